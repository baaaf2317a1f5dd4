"""The sandbox as a part of a reward server."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from mppo.rewards.workers.pool import cores
from mppo_sandbox.sandbox import Sandbox

PATH = "/run_code"
_MAX_S, _MAX_MB = 60, 4096


def sandbox_routes() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """The route of SandboxFusion's API, for Python programs in mppo's sandbox, by its path.

    ``mppo-serve-reward`` finds it by its entry point.

    Raises:
        ConfigError: this machine cannot isolate programs.
    """
    Sandbox().check()
    slots = threading.Semaphore(cores())

    def run_code(content: dict[str, Any]) -> Any:
        program, stdin = content.get("code"), content.get("stdin") or ""
        if not isinstance(program, str) or not isinstance(stdin, str):
            raise ValueError("code and stdin are not texts")
        if content.get("language") != "python":
            raise ValueError("this server runs python only")
        seconds, memory = content.get("run_timeout", 10), content.get("memory_limit_MB", 1024)
        limits = [seconds, memory]
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in limits):
            raise ValueError("run_timeout and memory_limit_MB are not numbers")
        sandbox = Sandbox(
            cpu_s=min(max(math.ceil(seconds), 1), _MAX_S),
            memory_mb=min(int(memory), _MAX_MB) if memory > 0 else _MAX_MB,
        )
        with slots:
            return _run(sandbox, program, stdin)

    return {PATH: run_code}


def _run(sandbox: Sandbox, program: str, stdin: str) -> Any:
    began = time.monotonic()
    result = sandbox.run(program, stdin=stdin)
    passed = result.finished and result.error is None
    return {
        "status": "Success" if passed else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "Finished" if result.finished else "TimeLimitExceeded",
            "execution_time": time.monotonic() - began,
            "return_code": (0 if passed else 1) if result.finished else None,
            "stdout": result.output,
            "stderr": result.error or "",
        },
        "executor_pod_name": None,
        "files": {},
    }
