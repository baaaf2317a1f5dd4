"""The judge that ``mppo-evaluate --judge`` asks, and the answers it compares a model's with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.rewards.remote.server import RewardServer
from mppo.safety.input_files import read_text
from mppo.trainer.validation.judge import Judgements, Pair, judge_pairs

if TYPE_CHECKING:  # it imports torch
    from mppo.batch.prompt import Prompt

KEY_VARIABLE = "MPPO_JUDGE_API_KEY"
"""Environment variable of the judge's key."""
_TIMEOUT_S = 120.0
_ROWS_BYTES = 1 << 32

Place = tuple[str, int, int]
"""Data source, index of the prompt, and number of the sample."""


@dataclass(frozen=True)
class Opponent:
    """A judge, and the answers that the evaluated model's are compared with: the other model's
    samples by place; None: the prompts' ground truths."""

    server: RewardServer
    model: str
    rows: Mapping[Place, Mapping[str, Any]] | None

    def check(self, prompts: Sequence[Prompt], samples: int) -> None:
        """Raise ConfigError if a prompt has no reference, or the other model did not answer it."""
        for prompt in prompts:
            if self.rows is None:
                if not prompt.ground_truth.strip():
                    why = f"prompt {prompt.uid} of {prompt.data_source} has no ground truth"
                    raise _issue("--judge", self.server.shown_url, why, "pass --against")
                continue
            for sample in range(samples):
                row = self.rows.get((prompt.data_source, prompt.uid, sample))
                if row is None or row["ground_truth"] != prompt.ground_truth:
                    why = f"has no sample {sample} of prompt {prompt.uid} of {prompt.data_source}"
                    fix = "write it with the same data and rollout.val_kwargs.n (--samples)"
                    raise _issue("--against", "", why, fix)

    def judge(self, lines: Sequence[str]) -> Judgements:
        """Compare responses; ConfigError if the judge did not judge a single pair."""
        pairs = []
        for row in map(json.loads, lines):
            other = row["ground_truth"] if self.rows is None else self.rows[_place(row)]["response"]
            pairs.append(Pair(row["prompt"], row["response"], other))
        found = judge_pairs(pairs, self.server, self.model)
        if not found.judged:
            why = f"judged none of {len(pairs)} pairs: {found.reason}"
            raise _issue("--judge", self.server.shown_url, why, "see to the judge's server")
        return found


def read_opponent(url: str | None, model: str | None, against: Path | None) -> Opponent | None:
    """The judge of the command line; None without ``--judge``. ConfigError: an option without the
    one it needs, an invalid URL or key, or a file that holds no samples."""
    if url is None:
        for option, value in (("--judge-model", model), ("--against", against)):
            if value is not None:
                raise _issue(option, str(value), "has no effect without --judge", "pass both")
        return None
    if model is None:
        raise _issue("--judge", url, "needs the judge's name", "pass --judge-model")
    key = KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else None
    names = {"url_key": "--judge", "env_key": KEY_VARIABLE, "timeout_key": None}
    server = RewardServer(url, _TIMEOUT_S, key, **names)
    return Opponent(server, model, None if against is None else _read_rows(against))


def _read_rows(file: Path) -> dict[Place, Mapping[str, Any]]:
    try:
        rows = [json.loads(line) for line in read_text(file, _ROWS_BYTES).splitlines() if line]
        found = {_place(row): row for row in rows if isinstance(row["response"], str)}
        if found and all("ground_truth" in row for row in rows):
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _issue("--against", str(file), f"holds no samples ({error})", _WRITE) from error
    raise _issue("--against", str(file), "holds no samples", _WRITE)


_WRITE = "give a file that mppo-evaluate --samples wrote"


def _place(row: Mapping[str, Any]) -> Place:
    return row["data_source"], row["index"], row["sample"]


def _issue(key: str, value: str, why: str, fix: str) -> ConfigError:
    return ConfigError([ConfigIssue(key, value, why, fix)], "arguments")
