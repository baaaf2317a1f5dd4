"""Random updates: how many have no valid schedule of their kind.

    python benchmarks/random_schedules.py [--updates 100000] [--seed 0] [--out FILE]

Each has one to eight stages, a critic and an actor with one to three mini-batches of unequal
numbers of micro-batches, one or two chunks per stage, passes with costs in tenths (such as 3.1 and
6.2), and the kind "fused" or "flush_free". Update ``i`` depends on the seed and ``i`` alone. Of
those that run by the sequential schedule, the result tells how many the model of waiting devices
refused (``mppo.pipeline.deadlock``), and how many have an invalid list. Times are processor
seconds.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import record

from mppo.pipeline.actions import RoleWork
from mppo.pipeline.schedule import make_schedule
from mppo.pipeline.schedule_checks import ScheduleFault, check_lists, checked_schedule
from mppo.recipe.schedule_kind import ScheduleKind

KINDS: tuple[ScheduleKind, ...] = ("fused", "flush_free")


def random_update(draw: random.Random) -> tuple[ScheduleKind, tuple[RoleWork, ...], int]:
    """Kind, roles and stages of an update."""
    stages = draw.randint(1, 8)
    chunks = draw.randint(1, 2) if stages > 1 else 1
    mini_batches = draw.randint(1, 3)

    def role(name: str) -> RoleWork:
        counts = [
            draw.randint(1, 6) if chunks == 1 else stages * draw.choice([1, 1, 1, 2])
            for _ in range(mini_batches)
        ]
        forward = draw.randint(1, 80) / 10
        backward = draw.choice([2, 3]) * forward
        reduce, step = (draw.choice([0.0, draw.randint(1, 80) / 10]) for _ in range(2))
        return RoleWork(name, tuple(counts), forward, backward, reduce, step, chunks)

    return draw.choice(KINDS), (role("critic"), role("actor")), stages


def judge(kind: ScheduleKind, roles: tuple[RoleWork, ...], stages: int) -> str:
    """What happens to an update."""
    _, fault = checked_schedule(kind, roles, stages)
    if fault is None:
        return "own schedule"
    try:
        check_lists(make_schedule(kind, roles, stages))
    except ScheduleFault:
        return "invalid"
    return "could hang"


def main() -> None:
    """Judge all updates."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.process_time()
    counts, refused = Counter[str](), []
    for number in range(arguments.updates):
        update = random_update(random.Random(f"{arguments.seed} {number}"))
        verdict = judge(*update)
        counts[verdict] += 1
        if verdict != "own schedule":
            refused.append({"update": number, "verdict": verdict, "what": repr(update)})
            print(refused[-1], flush=True)
        if (number + 1) % 1000 == 0:
            print(number + 1, dict(counts), flush=True)
    result = {
        "updates": arguments.updates,
        "own_schedule": counts["own schedule"],
        "could_hang": counts["could hang"],
        "invalid": counts["invalid"],
        "processor_s": time.process_time() - begin,
        "refused": refused,
    }
    record.record(result, arguments.out)


if __name__ == "__main__":
    main()
