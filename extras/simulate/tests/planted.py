"""Mistakes between ranks and streams, each planted into the simulated processes of a small model.

``python planted.py NAME...`` prints one line of JSON per name of ``PROGRAMS`` or ``MISTAKES``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from typing import Any

import planted_races  # noqa: F401  adds to MISTAKES
from mppo_simulate.case import RankCase
from mppo_simulate.isolated import isolated
from mppo_simulate.quick import with_layers
from mppo_simulate.rank import simulate_rank
from mppo_simulate.records import RankRecord
from mppo_simulate.together.findings import find
from mppo_simulate.together.together_run import rules_of
from planted_mistakes import MISTAKES
from simulated import loaded, sized, small_case

SHORT = ("data.max_prompt_length=64", "data.max_response_length=64")


def of_roles(*settings: str, roles: Sequence[str] = ("actor", "critic")) -> list[str]:
    """Overrides of several roles' settings."""
    return [f"{role}.{setting}" for role in roles for setting in settings]


SMALL_BATCHES = of_roles("ppo_mini_batch_size=4", "ppo_micro_batch_size_per_gpu=1")
MOVED = of_roles(
    "megatron.offload={parameters: true, gradients: true, optimizer: true}",
    "megatron.offload_activations=true",
)
STAGES = of_roles(
    "megatron.tensor_model_parallel_size=1", "megatron.pipeline_model_parallel_size=2"
)
ONE_ROLE = ("algorithm.adv_estimator=grpo", "rollout.n=2", "data.train_batch_size=2",
            "actor.ppo_mini_batch_size=2")  # fmt: skip


@dataclass(frozen=True)
class Program:
    """What the ranks do into which mistakes are planted.

    Args:
        case: makes the case.
        ranks: the ranks that are simulated.
    """

    case: Callable[[], RankCase]
    ranks: tuple[int, ...]


def _two_roles() -> RankCase:
    return small_case(
        *SHORT, *SMALL_BATCHES, *STAGES, *MOVED,
        "trainer.n_gpus_per_node=4", "data.train_batch_size=8", "rollout.n=1",
    )  # fmt: skip


def _one_role() -> RankCase:
    return small_case(
        *SHORT, *SMALL_BATCHES, *STAGES, *MOVED, *ONE_ROLE, "trainer.n_gpus_per_node=4"
    )


def _interleaved() -> RankCase:
    return small_case(
        *SHORT, *SMALL_BATCHES, *STAGES,
        *of_roles("megatron.virtual_pipeline_model_parallel_size=2"),
        "trainer.n_gpus_per_node=2", "data.train_batch_size=4", "rollout.n=1",
    )  # fmt: skip


def _mixture() -> RankCase:
    return sized(loaded(
        "recipes/qwen3_30b_a3b_gsm8k_math.yaml", *SHORT, *SMALL_BATCHES, *ONE_ROLE,
        *of_roles("megatron.tensor_model_parallel_size=1",
                  "megatron.pipeline_model_parallel_size=1",
                  "megatron.context_parallel_size=2", "megatron.expert_model_parallel_size=2",
                  "megatron.cp_comm_type=p2p", "use_dynamic_bsz=false",
                  "ppo_max_token_len_per_gpu=16384"),
        "actor.router_replay=off", "trainer.nnodes=1", "trainer.n_gpus_per_node=4",
        "actor.ppo_micro_batch_size_per_gpu=2",
    ), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=32)  # fmt: skip


PROGRAMS = {
    "two roles": Program(_two_roles, (0, 1, 2, 3)),
    "one role": Program(_one_role, (0, 1, 2, 3)),
    "interleaved": Program(_interleaved, (0, 1)),
    "mixture": Program(_mixture, (0, 1, 2)),
}


@dataclass(frozen=True)
class Failure:
    """The simulated code failed: the error in one line, and Python's traceback."""

    error: str
    stack: str


Answer = RankRecord | Failure


class _Answers(BaseException):
    """The update has begun in forked processes; their answers."""


def recorded(
    makes: Sequence[Callable[[], None]], rank: int, case: RankCase, early: Callable[[], None]
) -> list[Answer]:
    """Simulate a rank up to its update, and from there once per mistake, in forked processes.

    Args:
        makes: makes each mistake.
        rank: the rank.
        case: the case.
        early: makes a mistake from the beginning on.
    """
    import mppo_simulate.other_ranks  # noqa: F401  first: it keeps what the mistake replaces

    from mppo.models import offload
    from mppo.trainer.update.update_stage import UpdatePhase

    offload.AHEAD = 0  # else so small a model keeps all activations
    early()
    plain, senders = UpdatePhase.__init__, []

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        UpdatePhase.__init__ = plain
        answers = []
        for make in makes:
            receiver, sender = Pipe(duplex=False)
            child = os.fork()
            if not child:
                senders.append(sender)
                make()
                UpdatePhase.__init__(self, *args, **kwargs)
                return
            sender.close()
            answers.append(receiver.recv())
            os.waitpid(child, 0)
        raise _Answers(answers)

    UpdatePhase.__init__ = begin
    try:
        answer = simulate_rank(replace(case, rank=rank)).record
    except _Answers as found:
        return found.args[0]
    except Exception as error:
        if not senders:
            raise
        answer = Failure(str(error), "".join(traceback.format_exception(error)))
    senders[0].send(answer)
    os._exit(0)


def nothing() -> None:
    """No mistake."""


def simulated(name: str, mistakes: Sequence[str]) -> tuple[RankCase, dict[tuple[str, int], Answer]]:
    """Simulate the ranks of a program without a mistake and with some, by name and rank."""
    program = PROGRAMS[name]
    case = replace(with_layers(program.case(), 1), uneven=True, record=True)
    answers: dict[tuple[str, int], Answer] = {}
    for rank in program.ranks:
        here = {other: MISTAKES[other] for other in mistakes if rank in MISTAKES[other].ranks}
        late = {name: nothing}
        late |= {other: mistake.make for other, mistake in here.items() if not mistake.early}
        found = isolated(recorded, [*late.values()], rank, case, nothing)
        answers |= zip(((other, rank) for other in late), found, strict=True)
        for other, mistake in here.items():
            if mistake.early:
                (answers[other, rank],) = isolated(recorded, [nothing], rank, case, mistake.make)
    return case, answers


def judged(case: RankCase, answers: Sequence[Answer]) -> dict[str, Any]:
    """What is found among some ranks."""
    records = [answer for answer in answers if isinstance(answer, RankRecord)]
    failed = next((answer for answer in answers if isinstance(answer, Failure)), None)
    if failed is not None:
        return asdict(failed)
    found = find(records, [])
    if not found.found:
        found = find(records, rules_of(case.recipe, case.world_size))
    return {
        "mismatches": [one.describe() for one in found.mismatches],
        "races": found.races,
        "hangs": [one.describe() for one in found.hangs],
    }


def run(names: Sequence[str]) -> None:
    """Print what is found in each program and with each mistake."""
    for program, plan in PROGRAMS.items():
        mistakes = [n for n in names if n in MISTAKES and MISTAKES[n].program == program]
        chosen = [*([program] if program in names else ()), *mistakes]
        if not chosen:
            continue
        case, answers = simulated(program, mistakes)
        for name in chosen:
            own = [answers.get((name, rank), answers[program, rank]) for rank in plan.ranks]
            print(json.dumps({"name": name, **judged(case, own)}), flush=True)


if __name__ == "__main__":
    os.environ.pop("MPPO_DEVICE", None)
    warnings.simplefilter("ignore")
    from mppo_simulate.run import import_simulated_code

    import_simulated_code()
    run(sys.argv[1:])
