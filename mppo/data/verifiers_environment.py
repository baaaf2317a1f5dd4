"""Environments of the package ``verifiers``: the rows of their data sets, and their episodes.

An environment is an installed module with ``load_environment``. The ranks read its rows through a
process of its own, ``python -m mppo.data.verifiers_environment NAME ARGUMENTS SPLIT LIMIT``: its
libraries, signal handlers and clean-up stay out of the training processes. ``run`` is the agent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from itertools import islice
from typing import Any, Literal

from mppo.data.rows import DataRow
from mppo.recipe.errors import ConfigError, config_error
from mppo.safety.foreign_text import quoted

KEY = "rollout.environment.verifiers"
TASK = "verifiers:"
"""Begins the ``data.task`` whose prompts are those of an environment."""
_PLACE = "verifiers_row"
_INSTALL = 'pip install "verifiers==0.2.0" "openai==2.6.1" "openai-harmony==0.0.4"'
_REFUSED = 3
"""Exit code of the process that reads rows, if the environment cannot be used."""


async def run(
    client: Any, task: Mapping[str, Any], environment: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Run and score an episode of a row of the environment, for ``rollout.agent.run``; the policy
    answers ``client``, an ``openai.AsyncOpenAI``. RuntimeError if the environment has ended the
    episode with an error."""
    from verifiers.clients import OpenAIChatCompletionsClient

    split, place = task["extra_info"][_PLACE]
    known, rows = _loaded(environment, json.dumps(dict(arguments)), split)
    asks = OpenAIChatCompletionsClient(client)
    found = await known.run_rollout(rows[place], asks, "policy", {})
    if error := found.get("error"):
        raise RuntimeError(f"{environment}: {error}")
    return {"reward": found["reward"], "numbers": found["metrics"]}


def environment_rows(
    name: str, arguments: Mapping[str, Any], split: Literal["train", "val"], limit: int | None
) -> list[DataRow]:
    """The prompts of an environment's data set; an environment without an evaluation data set has
    no rows of the split "val".

    Raises:
        ConfigError: the package or the environment is missing, refuses its arguments, has no
            data set, or scores the episodes of a prompt together.
    """
    if find_spec("verifiers") is None:
        missing = ModuleNotFoundError("No module named 'verifiers'")
        raise _wrong(name, "its package verifiers is not installed", _INSTALL) from missing
    command = [
        sys.executable, "-m", "mppo.data.verifiers_environment", name, json.dumps(dict(arguments)),
        split, json.dumps(limit),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, _REFUSED):
        lines = done.stderr.strip().split("\n")
        raise _wrong(name, f"reading it failed: {quoted(lines[-1])}", "correct the environment")
    found = json.loads(done.stdout)
    if done.returncode == _REFUSED:
        raise _wrong(name, quoted(found["why"]), found["fix"])
    return [
        DataRow(
            prompt=row["prompt"],
            answer=row["answer"],
            data_source=name,
            extra={_PLACE: [split, place]},
            where=f"the environment {name}, {split} row {place}",
        )
        for place, row in enumerate(found)
    ]


def _wrong(name: str, why: str, fix: str) -> ConfigError:
    return config_error(KEY, name, why, fix)


@cache
def _loaded(name: str, arguments: str, split: str) -> tuple[Any, Any]:
    import verifiers

    known = verifiers.load_environment(name, **json.loads(arguments))
    if split == "train":
        return known, known.get_dataset()
    return known, known.get_eval_dataset() if known.eval_dataset_source else ()


def main(given: list[str]) -> int:
    """Write the rows of an environment as JSON, or why there are none; ``given``: name, arguments
    (JSON), split, and the largest number of rows (JSON)."""
    name, arguments, split, limit = given
    results = os.dup(1)
    os.dup2(2, 1)  # what libraries print
    found = _read(name, arguments, split, json.loads(limit))
    with open(results, "w") as stream:
        json.dump(found, stream)
    return 0 if isinstance(found, list) else _REFUSED


def _read(name: str, arguments: str, split: str, limit: int | None) -> Any:
    """The rows as JSON, or ``why`` and ``fix``."""
    try:
        known, rows = _loaded(name, arguments, split)
    except Exception as error:
        why = f"{error}".rstrip(".")
        fix = "install its package, and give rollout.environment.arguments that it takes"
        return {"why": why, "fix": fix}
    if known.requires_group_rollouts:
        why = "it scores the episodes of a prompt together, and here each is scored alone"
        return {"why": why, "fix": "use an environment whose rubric has no group rewards"}
    rows = islice(rows, limit)
    return [{"prompt": row["prompt"], "answer": str(row.get("answer", ""))} for row in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
