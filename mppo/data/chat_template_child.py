"""Renders conversations with a chat template, in a process that may be killed.

Started as a script by ``mppo.data.chat_template``. Reads a JSON job from standard input:

    path: Python's search path; template, variables: Jinja text, and what it may use besides
    conversations: lists of messages
    cpu_s, memory_mb: limits, on top of what the imports took; most: characters of one result

Writes a JSON line per conversation: its text, or ``{"error": text}`` and nothing more.
"""

import json
import math
import resource
import sys
import time


def limit_process(cpu_s, memory_mb):
    """Bound processor time and address space from here on."""
    with open("/proc/self/statm") as stream:
        pages = int(stream.read().split()[0])
    memory = pages * resource.getpagesize() + (memory_mb << 20)
    seconds = math.ceil(time.process_time() + cpu_s)
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def main():
    """See the module's text."""
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_process(job["cpu_s"], job["memory_mb"])
    for number, conversation in enumerate(job["conversations"], start=1):
        try:
            rendered, _ = render_jinja_template(
                [conversation],
                chat_template=job["template"],
                add_generation_prompt=True,
                **job["variables"],
            )
            text = rendered[0]
            if len(text) > job["most"]:
                raise ValueError(f"a text of {len(text)} characters")
        except Exception as error:
            text = {"error": f"{type(error).__name__} in prompt {number}: {error}"[:500]}
        print(json.dumps(text))
        if not isinstance(text, str):
            return


if __name__ == "__main__":
    main()
