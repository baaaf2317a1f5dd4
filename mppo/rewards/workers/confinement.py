"""Confinement of a process that runs text of a model: limits, privileges, system calls.

No step can be undone by the process. Imports the standard library only, because the sandbox imports
this module before it hides the file system.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Collection, Mapping

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
EPERM, EAGAIN, ENOSYS = 1, 11, 38

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column in ``SYSTEM_CALLS`` and the ``AUDIT_ARCH`` number of each machine."""

SYSTEM_CALLS = """
access 21 -; alarm 37 -; brk 12 214; clock_getres 229 114; clock_gettime 228 113; clock_nanosleep 230 115;
close 3 57; dup 32 23; dup2 33 -; dup3 292 24; epoll_create1 291 20; epoll_ctl 233 21; epoll_pwait 281 22;
epoll_wait 232 -; eventfd2 290 19; exit 60 93; exit_group 231 94; faccessat 269 48; faccessat2 439 439;
fadvise64 221 223; fcntl 72 25; fstat 5 80; fstatfs 138 44; futex 202 98; getcpu 309 168; getcwd 79 17;
getdents64 217 61; getegid 108 177; geteuid 107 175; getgid 104 176; getgroups 115 158; getitimer 36 102;
getpgid 121 155; getpgrp 111 -; getpid 39 172; getppid 110 173; getrandom 318 278; getresgid 120 150;
getresuid 118 148; getrlimit 97 163; getrusage 98 165; getsid 124 156; gettid 186 178; gettimeofday 96 169;
getuid 102 174; ioctl 16 29; lseek 8 62; lstat 6 -; madvise 28 233; mmap 9 222; mprotect 10 226;
mremap 25 216; munmap 11 215; nanosleep 35 101; newfstatat 262 79; open 2 -; openat 257 56; pause 34 -;
pipe 22 -; pipe2 293 59; poll 7 -; ppoll 271 73; pread64 17 67; prlimit64 302 261; pselect6 270 72;
pwrite64 18 68; read 0 63; readlink 89 -; readlinkat 267 78; readv 19 65; recvfrom 45 207;
restart_syscall 219 128; rt_sigaction 13 134; rt_sigpending 127 136; rt_sigprocmask 14 135;
rt_sigreturn 15 139; rt_sigsuspend 130 133; rt_sigtimedwait 128 137; sched_getaffinity 204 123;
sched_yield 24 124; select 23 -; sendto 44 206; setitimer 38 103; shutdown 48 210; sigaltstack 131 132;
socketpair 53 199; stat 4 -; statfs 137 43; statx 332 291; sysinfo 99 179; time 201 -; times 100 153;
umask 95 166; uname 63 160; wait4 61 260; waitid 247 95; write 1 64; writev 20 66;
clone 56 220; clone3 435 435; fork 57 -; vfork 58 -
"""  # noqa: E501
"""Every system call that the filter names, with its number on x86_64 and on aarch64 (- if none)."""

REFUSALS = {"clone": EAGAIN, "clone3": ENOSYS, "fork": EAGAIN, "vfork": EAGAIN}
"""Calls that are refused with an error of their own: EAGAIN, which a process at its limit gets, or
ENOSYS, which makes libc fall back to an older call. Calls that are not named are refused with
EPERM."""

OPEN_TO_WRITE = 0o1103  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
ONLY_WITH: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "open": (1, OPEN_TO_WRITE, (0,)),
    "openat": (2, OPEN_TO_WRITE, (0,)),
    "prlimit64": (0, 0xFFFFFFFF, (0,)),
    "socketpair": (0, 0xFFFFFFFF, (1,)),
    "fcntl": (1, 0xFFFFFFFF, (0, 1, 2, 3, 4, 1030)),
    "ioctl": (1, 0xFFFFFFFF, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
}
"""Calls that are allowed for some values of one argument: the argument's index, a mask, and the
masked values. They allow reading, the process's own limits, pairs of local sockets, copies and
flags of descriptors, and queries of a terminal."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Call a libc function; raise an OSError that names it if it fails."""
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def close_files(kept: Collection[int]) -> None:
    """Close every open descriptor except standard input, output, error and ``kept``."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError as error:
                if error.errno != 9:  # EBADF: the listing's own descriptor
                    raise


def limit(limits: Mapping[str, int]) -> None:
    """Set soft and hard resource limits; the names lack ``RLIMIT_``."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def die_first() -> None:
    """Have the kernel kill this process and its children first if memory runs out."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread ends. ``parent``: its pid, or 0 if
    the parent is in another namespace."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the call


def drop_privileges() -> None:
    """Drop all capabilities and all ways to gain privileges, and allow only harmless system calls;
    OSError if the kernel refused, or the table has no system calls for this processor."""
    filter_ = filter_program(platform.machine())
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    buffer = ctypes.create_string_buffer(filter_, len(filter_))
    program = struct.pack("HxxxxxxQ", len(filter_) // 8, ctypes.addressof(buffer))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)


def filter_program(machine: str) -> bytes:
    """The seccomp filter that allows the calls of ``SYSTEM_CALLS``, in classic BPF, 8 bytes per
    instruction; OSError if the table has none for the machine."""
    if machine not in ARCHITECTURES:
        raise OSError(ENOSYS, f"the system calls of {machine} are not known to the filter")
    column, architecture = ARCHITECTURES[machine]
    load, equal, and_, return_ = 0x20, 0x15, 0x54, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000, 0x80000000
    # struct seccomp_data: number at 0, architecture at 4, arguments from 16 on. A program of
    # another architecture numbers its calls differently, so it is killed.
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (return_, 0, 0, kill), (load, 0, 0, 0)]
    for entry in SYSTEM_CALLS.split(";"):
        name, *numbers = entry.split()
        if numbers[column] == "-":
            continue
        body = [(return_, 0, 0, refuse | REFUSALS[name] if name in REFUSALS else allow)]
        if name in ONLY_WITH:
            place, mask, values = ONLY_WITH[name]
            # compares 32 bits: the kernel ignores the upper half of these arguments too
            body = [(load, 0, 0, 16 + 8 * place), (and_, 0, 0, mask)]
            for value in values:
                body += [(equal, 0, 1, value), (return_, 0, 0, allow)]
            body.append((return_, 0, 0, refuse | EPERM))
        # another call jumps over the body, to the comparison with the next number
        steps += [(equal, 0, len(body), int(numbers[column])), *body]
    steps.append((return_, 0, 0, refuse | EPERM))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
