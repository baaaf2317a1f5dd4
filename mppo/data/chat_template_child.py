"""Renders conversations with a chat template, in a process with limits.

Started as a script by ``mppo.data.chat_template`` and ``chat_renderer``. The first line of standard
input is the job, as JSON:

    path: Python's search path; template, variables: the Jinja text and its variables
    conversations: lists of messages; null: each further line of standard input is one conversation
        with its variables, as ``[messages, variables]``
    add_generation_prompt: end with what comes before a response
    keep_going: go on after a conversation that fails
    cpu_s, memory_mb: limits, added to what the imports used; of the process, or of each
        conversation that has a line of its own; max_characters: of one rendered text

Writes a JSON line per conversation: its text, or ``{"error": text}``.
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


def limit_time(cpu_s, most=None):
    """Allow ``cpu_s`` beyond the processor time in use; later calls may extend it to ``most``."""
    seconds = math.ceil(time.process_time() + cpu_s)
    most = seconds if most is None else most
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))


def conversations_of(job):
    """The conversations with their variables; a limit of time for each that has its own line."""
    if job["conversations"] is not None:
        limit_time(job["cpu_s"])
        for messages in job["conversations"]:
            yield messages, job["variables"]
        return
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin:
        messages, variables = json.loads(line)
        limit_time(job["cpu_s"], most)
        yield messages, {**job["variables"], **variables}


def main():
    job = json.loads(sys.stdin.readline())
    sys.path[:] = job["path"]
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_process(job["memory_mb"])
    for number, (messages, variables) in enumerate(conversations_of(job), start=1):
        try:
            rendered, _ = render_jinja_template(
                [messages],
                chat_template=job["template"],
                add_generation_prompt=job["add_generation_prompt"],
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
        if not isinstance(text, str) and not job["keep_going"]:
            return


if __name__ == "__main__":
    main()
