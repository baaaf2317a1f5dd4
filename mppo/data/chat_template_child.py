"""Renders conversations with a chat template, in a process with limits.

Started as a script by ``mppo.data.chat_template``. The job is JSON on standard input:

    path: Python's search path; template, variables: the Jinja text and its variables
    conversations: lists of messages
    add_generation_prompt: end with what comes before a response
    keep_going: go on after a conversation that fails
    cpu_s, memory_mb: limits, added to what the imports used; max_characters: of one rendered text

Writes a JSON line per conversation: its text, or ``{"error": text}``.
"""

import json
import math
import resource
import sys
import time


def limit_process(cpu_s, memory_mb):
    """Allow ``cpu_s`` and ``memory_mb`` beyond the processor time and address space in use."""
    with open("/proc/self/statm") as stream:
        pages = int(stream.read().split()[0])
    memory = pages * resource.getpagesize() + (memory_mb << 20)
    seconds = math.ceil(time.process_time() + cpu_s)
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def main():
    """Render the job of standard input (see the module's docstring)."""
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_process(job["cpu_s"], job["memory_mb"])
    for number, conversation in enumerate(job["conversations"], start=1):
        try:
            rendered, _ = render_jinja_template(
                [conversation],
                chat_template=job["template"],
                add_generation_prompt=job["add_generation_prompt"],
                **job["variables"],
            )
            text = rendered[0]
            if len(text) > job["max_characters"]:
                raise ValueError(
                    f"a text of {len(text)} characters, more than {job['max_characters']}"
                )
        except Exception as error:
            text = {"error": f"{type(error).__name__} in prompt {number}: {error}"[:500]}
        print(json.dumps(text), flush=True)  # of a process killed later, these are complete
        if not isinstance(text, str) and not job["keep_going"]:
            return


if __name__ == "__main__":
    main()
