"""Environment variables of mppo and of its batch scripts."""

from __future__ import annotations

from collections.abc import Mapping

from mppo.recipe.errors import nearest

PREFIX = "MPPO_"

PROGRAM_VARIABLES: dict[str, str] = {
    "MPPO_DEVICE": "`cpu` or `cuda`: the device of the ranks; default: a GPU where torch sees one",
    "MPPO_SHARE_GPU": "`1`: several ranks may use one GPU, slowly; default: each has its own",
    "MPPO_LAUNCHER": "`torchrun`, `slurm`, `mpi` or `python`: what started the ranks; default: "
    "detected",
    "MPPO_CACHE": "folder of the embedded models; default: `~/.cache/mppo`",
    "MPPO_ROLLOUT_API_KEY": "key of the servers in `rollout.urls`, and of `mppo.serve`",
    "MPPO_REWARD_API_KEY": "key that clients of `mppo-serve-reward` must send",
    "MPPO_JUDGE_API_KEY": "key that `mppo-evaluate` sends to the judge of `--judge URL`",
    "MPPO_SGLANG_THREADS": "CPU threads of an SGLang server; default: 1",
    "MPPO_TRACEBACK": "if set, every failure prints its traceback",
}
"""Variables that the programs read, with their meaning."""

SCRIPT_VARIABLES = frozenset(
    {
        "MPPO_COMMAND", "MPPO_CONTAINER", "MPPO_ENTRY", "MPPO_HERE", "MPPO_INSIDE", "MPPO_LAUNCH",
        "MPPO_MAX_REQUEUES", "MPPO_NODES", "MPPO_PREFLIGHT", "MPPO_PREFLIGHT_S", "MPPO_PYTHON",
        "MPPO_RANKS_PER_NODE", "MPPO_ROOT", "MPPO_SERVED", "MPPO_SRUN", "MPPO_WORLD",
    }
)  # fmt: skip
"""Variables that the scripts in ``slurm/`` read or set; ``slurm/common.sh`` documents them."""


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for every variable that starts with ``MPPO_`` and is not one of mppo's."""
    known = {*PROGRAM_VARIABLES, *SCRIPT_VARIABLES}
    lines = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            guess = nearest(name[len(PREFIX) :], [each[len(PREFIX) :] for each in known])
            hint = (
                f"did you mean {PREFIX}{guess}?"
                if guess
                else f"known variables: {', '.join(sorted(known))}"
            )
            lines.append(f"the environment variable {name} is not read: {hint}")
    return lines
