"""Renders conversations with a chat template, in a process with limits.

Started as a script by ``mppo.data.chat_template``. The first line of standard input is the job, as
JSON:

    path: Python's search path; template, variables: the Jinja text and its variables
    add_generation_prompt: end with what comes before a response
    cpu_s, memory_mb: limits, added to what the imports used; max_characters: of one rendered text
    together: cpu_s holds for all conversations, and the first error is the end; else for each

Each further line is a conversation with further variables, as ``[messages, variables]``. Writes a
JSON line per conversation: its text, or ``{"error": text}``.
"""

import json
import math
import resource
import sys
import time


def limit_process(memory_mb):
    """Allow ``memory_mb`` beyond the address space in use, and no core file."""
    with open("/proc/self/statm") as stream:
        pages = int(stream.read().split()[0])
    memory = pages * resource.getpagesize() + (memory_mb << 20)
    for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))


def main():
    job = json.loads(sys.stdin.readline())
    sys.path[:] = job["path"]
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_process(job["memory_mb"])
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for number, line in enumerate(sys.stdin, start=1):
        if number == 1 or not job["together"]:
            seconds = math.ceil(time.process_time() + job["cpu_s"])
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
        messages, variables = json.loads(line)
        try:
            rendered, _ = render_jinja_template(
                [messages],
                chat_template=job["template"],
                add_generation_prompt=job["add_generation_prompt"],
                **job["variables"],
                **variables,
            )
            text = rendered[0]
            if len(text) > job["max_characters"]:
                raise ValueError(
                    f"a text of {len(text)} characters, more than {job['max_characters']}"
                )
        except Exception as error:
            text = {"error": f"{type(error).__name__} in prompt {number}: {error}"[:500]}
        print(json.dumps(text), flush=True)  # of a process killed later, these are complete
        if job["together"] and not isinstance(text, str):
            return


if __name__ == "__main__":
    main()
