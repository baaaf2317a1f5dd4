"""The system-call filter has the right numbers."""

import re
import struct
from pathlib import Path

import pytest

from mppo.rewards.workers.confinement import ONLY_WITH, REFUSALS, SYSTEM_CALLS, filter_program

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
HEADERS = {0: "x86_64-linux-gnu/asm/unistd_64.h", 1: "asm-generic/unistd.h"}
NUMBER = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", re.MULTILINE)
X86_64 = 0xC000003E


def calls(column):
    for entry in SYSTEM_CALLS.split(";"):
        name, *numbers = entry.split()
        if numbers[column] != "-":
            yield name, int(numbers[column])


def answer(number, *arguments, architecture=X86_64):
    """The filter's decision on a system call, by an interpreter of its instructions."""
    data = struct.pack("IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    program = filter_program("x86_64")
    steps = list(struct.iter_unpack("HBBI", program))
    value = place = 0
    while True:
        code, yes, no, operand = steps[place]
        place += 1
        if code == 0x20:
            (value,) = struct.unpack_from("I", data, operand)
        elif code == 0x54:
            value &= operand
        elif code == 0x15:
            place += yes if value == operand else no
        else:
            return operand


@pytest.mark.parametrize("column", HEADERS)
def test_the_system_call_numbers_are_the_kernels(column):
    header = Path("/usr/include") / HEADERS[column]
    if not header.is_file():
        pytest.skip(f"the kernel's headers are not installed: {header}")
    known = {name: int(number) for name, number in NUMBER.findall(header.read_text())}
    if column == 1:
        known["newfstatat"] = known["fstatat"]
    wrong = {name: number for name, number in calls(column) if known.get(name) != number}
    assert not wrong


def test_only_named_system_calls_are_allowed():
    numbers = dict(calls(0))
    for name, number in numbers.items():
        if name in REFUSALS:
            assert answer(number) == REFUSE | REFUSALS[name]
        elif name not in ONLY_WITH:
            assert answer(number) == ALLOW, name
    for number in set(range(600)) - set(numbers.values()):
        assert answer(number) == REFUSE | 1
    assert answer(0x40000000) == REFUSE | 1
    assert answer(0, architecture=0x40000003) == KILL


def test_some_system_calls_are_allowed_with_some_arguments():
    numbers = dict(calls(0))
    read_only, cloexec, write, create = 0, 0o2000000, 1, 0o100
    assert answer(numbers["openat"], 0, 0, read_only | cloexec) == ALLOW
    for flags in (write, 2, create, 0o1000, write | cloexec):
        assert answer(numbers["openat"], 0, 0, flags) == REFUSE | 1
        assert answer(numbers["open"], 0, flags) == REFUSE | 1
    assert answer(numbers["socketpair"], 1) == ALLOW
    assert answer(numbers["socketpair"], 40) == REFUSE | 1
    assert answer(numbers["prlimit64"], 0) == ALLOW
    assert answer(numbers["prlimit64"], 4711) == REFUSE | 1
    # the kernel reads 32 bits of these arguments, and so does the filter
    assert answer(numbers["ioctl"], 0, 0x5412 | 1 << 32) == REFUSE | 1


def test_a_processor_without_a_table_is_an_error():
    with pytest.raises(OSError, match="riscv64 are not known"):
        filter_program("riscv64")
