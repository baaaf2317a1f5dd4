"""Which version of its system a command looks like, by flags that only some versions have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

SHOWN = 8
"""Most flags that a message names."""


class Versions(NamedTuple):
    """Versions of a system.

    Args:
        known: whose flags the table has.
        marks: a version, and a regular expression of flags that it alone has.
        section: the system's part of the page.
    """

    known: str
    marks: tuple[tuple[str, str], ...]
    section: str


VERSIONS = {
    "verl": Versions(
        "0.3 to 0.9",
        (
            (
                "0.8 or later",
                r"critic\.fsdp\..*|reward\.\w+\..*|\w+\.use_v1|.*\.(engine|veomni)\..*",
            ),
            ("0.4 to 0.7", r".*_per_gpu|custom_reward_function\..*|.*\.(fsdp_config|megatron)\..*"),
            ("0.3 or earlier", r".*_micro_batch_size"),
        ),
        "verl",
    ),
    "TRL": Versions(
        "0.9 to 1.12",
        (
            ("0.12 or later (PPOTrainer)", r"missing_eos_penalty|kl_estimator|.*_dtype"),
            ("0.9 to 0.11 (PPOv2Trainer)", r"non_eos_penalty|penalty_reward_value|num_ppo_epochs"),
            (
                "0.8 or earlier (a PPOConfig of one step)",
                r"ppo_epochs|mini_batch_size|init_kl_coef",
            ),
        ),
        "trl-ppotrainer",
    ),
    "OpenRLHF": Versions(
        "0.1 to 0.11", (("0.10 or later", r".*\..*"), ("0.9 or earlier", r".*_.*")), "openrlhf"
    ),
    "DeepSpeed-Chat": Versions("DeepSpeedExamples of 2023 and later", (), "deepspeed-chat-step-3"),
}


def explained(title: str, names: Sequence[str], unknown: Sequence[str]) -> str:
    """What is known of a command: its version, the flags that are understood, where to look.

    Args:
        title: of the system.
        names: flags of the command, without their values.
        unknown: those that no table has.
    """
    versions = VERSIONS[title]
    looks = next((v for v, mark in versions.marks if any(re.fullmatch(mark, n) for n in names)), "")
    what = f"it looks like {title} {looks}" if looks else f"its version of {title} is not clear"
    understood = [name for name in names if name not in unknown]
    parts = [f"{what}; {len(understood)} of its {len(names)} flags are understood"]
    parts += [f" ({_listed(understood)})"] if understood else []
    parts += [f", not {_listed(unknown)}" if unknown else ""]
    where = f"docs/migrating.md#{versions.section}"
    return f"{''.join(parts)}. The table has the flags of {versions.known}: {where}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
