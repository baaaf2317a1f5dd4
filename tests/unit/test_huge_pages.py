"""The heap of a rank on the CPU asks for huge pages, and holds no memory for it."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, re, resource
import torch
from mppo.parallel import device, huge_pages

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

before = resident()
device.keep_freed_memory()
advised = huge_pages.advise_heap()
grown = resident() - before
tensors = [torch.ones(width) for width in (1 << 18, 1 << 20, 1 << 22)]
addresses = [x.data_ptr() for x in tensors]
del tensors
mappings, flags = [], {}
for line in open("/proc/self/smaps"):
    if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
        mappings.append(range(int(found[1], 16), int(found[2], 16)))
    elif line.startswith("VmFlags:"):
        flags[mappings[-1]] = line.split()[1:]
where = [next(m for m in mappings if address in m) for address in addresses]
kept = resident() - before
print(json.dumps({"advised": advised, "grown": grown, "kept": kept,
                  "huge": ["hg" in flags[m] for m in where]}))
"""


def test_tensors_lie_where_huge_pages_were_asked_for():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["advised"] >= 1 << 29
    assert found["grown"] < 16 << 20, "memory that was only asked for is resident"
    assert found["kept"] > 16 << 20, "a freed tensor's memory went back to the system"
    assert found["huge"] == [True] * 3
