"""Runs one program without network, files, other processes and privileges.

Started by ``mppo_sandbox.sandbox`` with ``python -I``. Imports only the standard library
and ``mppo.rewards.workers.confinement``. There are two processes: the first enters the namespaces,
waits for the second and reports in its exit code how it ended (0: by itself, with exit code 0); the
second runs the program. The job is JSON on standard input:

    program, tests: Python source, and source lines run after it in the same namespace
    stdin: standard input of the program; parent: pid of the process that waits for this one
    result_fd: descriptor of the result pipe
    cpu_s, wall_s, memory_mb, output_mb: limits; modules: imported before the confinement

The result: ``!text`` if nothing was run; otherwise ``R`` before the program runs, then ``Etext.``
(the program raised) or ``D``, a ``1`` or ``0`` for each test, and ``.``. The program shares this
process, so it can forge everything after ``R``.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
import time
import traceback

from mppo.rewards.workers.confinement import (
    PR_SET_DUMPABLE,
    call,
    close_files,
    die_first,
    die_with_parent,
    drop_privileges,
    libc,
    limit,
)

NOBODY, ROOT = 65534, "/tmp"
"""The user, and the folder that hides all others."""
ERROR_BYTES = 2000
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_CAPBSET_DROP = 24
STANDARD_MODULES = (
    "abc", "array", "bisect", "calendar", "cmath", "collections", "contextlib", "copy",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq",
    "io", "itertools", "json", "math", "numbers", "operator", "pprint", "queue", "random", "re",
    "statistics", "string", "struct", "sys", "textwrap", "threading", "time", "types", "typing",
    "unicodedata", "unittest", "zoneinfo",
)  # fmt: skip


def enter_namespaces():
    """Enter new network, mount, process and IPC namespaces, and a user namespace unless root may do
    without: the root of a container becomes the user nobody first.

    Mounts an empty read-only file system over the folder ``ROOT``, in this namespace only.
    """
    flags = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC
    if os.geteuid() != 0 or libc.unshare(flags) < 0:
        if os.geteuid() == 0:
            become_nobody()
            call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # or the maps belong to root
        uid, gid = os.geteuid(), os.getegid()
        call("unshare", flags | CLONE_NEWUSER)
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {uid} 1"),
            ("gid_map", f"{NOBODY} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    call("mount", b"none", ROOT.encode(), b"tmpfs", flags, b"size=4k,mode=555")


def become_nobody():
    """Change from root to the user nobody."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def confine(job):
    """Become the user nobody in a new session and an empty root, without capabilities, with limits.

    The session separates the process group from the trainer's. A process namespace alone does not
    stop signals to the process group or changes of its niceness.
    """
    os.setsid()
    close_files({job["result_fd"]})
    os.chroot(ROOT)
    os.chdir("/")
    if os.geteuid() == 0:
        for capability in range(64):
            if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
                break  # past the last, or not permitted: drop_privileges() drops all
        become_nobody()
    die_with_parent(0)  # after the change of user, which resets the setting
    limit(
        {
            "CPU": job["cpu_s"],
            "AS": job["memory_mb"] << 20,
            "FSIZE": job["output_mb"] << 20,
            "NPROC": 0,
            "CORE": 0,
            "NOFILE": 16,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
        }
    )
    drop_privileges()


def run(job):
    """Run the program, then its tests one by one; return the rest of the result as bytes."""
    namespace = {"__name__": "__main__"}
    sys.stdin = io.StringIO(job["stdin"])
    error = None
    try:
        exec(compile(job["program"], "<program>", "exec"), namespace)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            error = f"SystemExit: {stop.code}"
    except BaseException:  # a program that raises KeyboardInterrupt has failed as well
        error = traceback.format_exc(limit=-1)
    if error is not None:
        # the last line of a traceback is the exception itself
        return b"E" + error.encode(errors="replace")[-ERROR_BYTES:] + b"."
    passed = bytearray()
    for test in job["tests"]:
        try:
            exec(compile(test, "<test>", "exec"), namespace)
            passed += b"1"
        except BaseException:  # a test may call functions of the program, which may raise anything
            passed += b"0"
    return b"D" + passed + b"."


def watch(pid, job):
    """Wait for the program; kill it at the time limit, or when the trainer has ended.

    Returns:
        0 if the program's process ended with exit code 0, else 1.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    deadline = time.monotonic() + job["wall_s"]
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return 0 if status == 0 else 1
        if time.monotonic() > deadline or os.getppid() != job["parent"]:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def main():
    """Run the job of standard input."""
    job = json.load(sys.stdin)
    result_fd, write = job["result_fd"], os.write
    for name in (*STANDARD_MODULES, *job["modules"]):
        importlib.import_module(name)
    # both import modules at their first use, which is not possible in the empty root
    compile("0", "<warm>", "exec")
    traceback.format_exc()
    try:
        die_first()
        enter_namespaces()
        pid = os.fork()
    except OSError as error:
        write(result_fd, f"!{error}".encode())
        sys.exit(1)
    if pid:
        os.close(result_fd)
        sys.exit(watch(pid, job))
    try:
        confine(job)
    except OSError as error:
        write(result_fd, f"!{error}".encode())
        os._exit(1)
    code = 1
    try:
        write(result_fd, b"R")
        end = run(job)
        if sys.stdout is not None:
            sys.stdout.flush()
        write(result_fd, end)
        code = 0
    finally:  # skips the exit handlers and threads that the program may have installed
        os._exit(code)
