"""Runs one program cut off from network, files, other processes and privileges.

Started as a script by ``mppo.rewards.sandbox`` with ``python -I``, it imports the standard library
only. Reads a JSON job from standard input:

    program, tests: Python source, and source lines run after it in the same namespace
    stdin: what the program reads; root: an empty folder; result_fd: where the verdict goes
    cpu_s, wall_s, memory_mb, output_mb: limits; modules: imported before the doors close

The verdict is JSON: ``{"isolated": true, "passed": [bool, ...], "error": text or null}``. Without
one the program did not come to its end.
"""

import ctypes
import importlib
import io
import json
import os
import resource
import signal
import sys
import time
import traceback

NOBODY = 65534
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITY_VERSION_3 = 0x20080522
STANDARD_MODULES = (
    "abc", "array", "bisect", "calendar", "cmath", "collections", "contextlib", "copy",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq",
    "io", "itertools", "json", "math", "numbers", "operator", "pprint", "queue", "random", "re",
    "statistics", "string", "struct", "sys", "textwrap", "threading", "time", "types", "typing",
    "unicodedata", "unittest", "zoneinfo",
)  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """Call into libc; a failure is an OSError that names the call."""
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter_namespaces(root):
    """Own user (unless root already), network, mount, process and IPC namespaces; ``root`` becomes
    an empty read-only file system."""
    flags = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC
    if os.geteuid() == 0:
        call("unshare", flags)
    else:
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
    call("mount", b"none", root.encode(), b"tmpfs", flags, b"size=4k,mode=555")


def close_files(kept):
    """Close every inherited file but standard input, output, error and ``kept``."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            try:
                os.close(int(name))
            except OSError as error:
                if error.errno != 9:  # EBADF: the listing's own descriptor
                    raise


def drop_privileges(job):
    """Nobody, without capabilities, in an empty root, under limits."""
    os.chroot(job["root"])
    os.chdir("/")
    if os.geteuid() == 0:
        for capability in range(64):
            if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
                break  # past the last; where none may be dropped, capset and NO_NEW_PRIVS do
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    for name, limit in (
        ("RLIMIT_CPU", job["cpu_s"]),
        ("RLIMIT_AS", job["memory_mb"] << 20),
        ("RLIMIT_FSIZE", job["output_mb"] << 20),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", 16),
    ):
        resource.setrlimit(getattr(resource, name), (limit, limit))


def run(job):
    """The program, then its tests one by one; the verdict as a dict."""
    namespace = {"__name__": "__main__"}
    sys.stdin = io.StringIO(job["stdin"])
    passed, error = [], None
    try:
        exec(compile(job["program"], "<program>", "exec"), namespace)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            error = f"SystemExit: {stop.code}"
    except BaseException:  # whatever a program raises, Ctrl-C's exception too, it has failed
        error = traceback.format_exc(limit=-1)
    for test in job["tests"] if error is None else ():
        try:
            exec(compile(test, "<test>", "exec"), namespace)
            passed.append(True)
        except BaseException:  # the same of a test, which may call what the program defined
            passed.append(False)
    return {"isolated": True, "passed": passed, "error": error}


def watch(pid, wall_s):
    """Wait for the program; kill it when its time is over."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    deadline = time.monotonic() + wall_s
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def main():
    job = json.load(sys.stdin)
    verdict_fd, write = job["result_fd"], os.write
    for name in (*STANDARD_MODULES, *job["modules"]):
        importlib.import_module(name)
    compile("0", "<warm>", "exec")
    traceback.format_exc()
    try:
        enter_namespaces(job["root"])
    except OSError as error:
        write(verdict_fd, json.dumps({"isolated": False, "error": str(error)}).encode())
        return
    pid = os.fork()
    if pid:
        watch(pid, job["wall_s"])
        return
    try:
        close_files(verdict_fd)
        drop_privileges(job)
    except OSError as error:
        write(verdict_fd, json.dumps({"isolated": False, "error": str(error)}).encode())
        os._exit(1)
    verdict = json.dumps(run(job))
    sys.stdout.flush()
    write(verdict_fd, verdict.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
