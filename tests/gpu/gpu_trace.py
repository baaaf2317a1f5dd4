"""What a trace of torch's profiler says of each stage of a step."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the CUDA runtime in which the host waits for the GPU."""
_SHOWN = 25


def summary(trace: Path) -> dict[str, dict[str, Any]]:
    """Seconds, kernels and waits of the host by stage (``Run.stage``).

    A kernel belongs to the stage in which it was launched.

    Args:
        trace: file of ``trainer.profile``.

    Returns:
        By stage: ``seconds`` of the host; number of ``kernels``, and the sum of their durations
        ``kernel_s``; ``waits``; and by name the ``microseconds`` of the longest.
    """
    with gzip.open(trace, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    stages = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].isidentifier()
    )
    begins = [begin for begin, _, _ in stages]

    def stage_of(at: float) -> str:
        place = bisect_right(begins, at) - 1
        return stages[place][2] if place >= 0 and at <= stages[place][1] else "between"

    found: dict[str, dict[str, Any]] = {}
    for name in [*dict.fromkeys(name for *_, name in stages), "between"]:
        seconds = sum(end - begin for begin, end, stage in stages if stage == name) / 1e6
        numbers = {"seconds": seconds, "kernels": 0, "kernel_s": 0.0, "waits": 0}
        found[name] = {**numbers, "microseconds": Counter()}
    launched = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            stage = stage_of(event["ts"])
            launched[event["args"].get("correlation")] = stage
            found[stage]["waits"] += event["name"] in _WAITS
    for event in events:
        if event.get("cat") == "kernel":
            stage = found[launched.get(event["args"].get("correlation"), "between")]
            stage["kernels"] += 1
            stage["kernel_s"] += event["dur"] / 1e6
            stage["microseconds"][event["name"][:80]] += event["dur"]
    for stage in found.values():
        stage["microseconds"] = dict(stage["microseconds"].most_common(_SHOWN))
    return found
