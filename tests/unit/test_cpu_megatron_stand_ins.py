"""The CPU's stand-ins apply to Megatron whatever was imported before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, pkgutil, sys
import mppo.models, mppo.pipeline, mppo.trainer

for package in (mppo.models, mppo.pipeline, mppo.trainer):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from mppo.cpu import megatron_stand_ins

megatron_stand_ins.install()
for name, module in list(sys.modules.items()):
    if name.startswith("mppo."):
        for value in vars(module).values():
            home = getattr(value, "__module__", None) or ""
            if home.startswith("megatron.") and callable(value):
                current = getattr(sys.modules[home], value.__name__, value)
                if current is not value:
                    print(name, value.__name__)
"""


def test_every_module_uses_the_stand_ins():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "MPPO_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
