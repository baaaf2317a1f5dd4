"""Responses that no step has trained on yet, as safetensors files of a checkpoint, one per rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from mppo.batch.episode import Episode, EpisodesBySample, EpisodeTokens
from mppo.batch.prompt import Prompt
from mppo.parallel.partition import partition
from mppo.safety.input_files import parse_json
from mppo.weights.hf.safetensors_file import read_header

_FILES = "responses*.safetensors"
"""Checkpoints of earlier versions have one file for all ranks."""
_TABLE = "responses"


def file_of_rank(rank: int) -> str:
    """Name of the file with the responses whose home is a rank."""
    return f"responses_{rank:05d}.safetensors"


def to_bytes(held: EpisodesBySample) -> bytes:
    """Serialise the partial responses of a rank. For response r the file has ``r/prompt_ids`` and
    ``r/response_ids`` (int64), ``r/logprobs`` (float32, as in a batch) and, if known,
    ``r/routed_experts`` (int16 ``[tokens, layers, k]``); other fields are JSON in the header."""
    tensors: dict[str, Tensor] = {}
    table = []
    for row, ((uid, sample), response) in enumerate(held.items()):
        tensors[f"{row}/prompt_ids"] = response.prompt.token_ids.long()
        tokens = response.here
        tensors[f"{row}/response_ids"] = tokens.ids.long()
        tensors[f"{row}/logprobs"] = tokens.logprobs.clone()
        if tokens.experts is not None:
            tensors[f"{row}/routed_experts"] = tokens.experts.clone()
        table.append(
            {
                "uid": uid,
                "sample": sample,
                "finish_reason": response.finish_reason,
                "weight_version": response.parts[-1][0],
                "earlier": response.parts[:-1],
            }
        )
    return save(tensors, metadata={_TABLE: json.dumps(table)})


def load_responses(folder: Path, rank: int = 0, world: int = 1) -> EpisodesBySample:
    """Load the responses of a checkpoint; none if it has no such file. They get homes of nearly
    equal numbers of tokens, whatever the number of ranks that saved them. Their prompts have only
    uid and tokens; ``GenerationRequest.resumed`` replaces them by the full prompts. ValueError,
    KeyError, TypeError: a file does not hold such responses."""
    files = sorted(folder.glob(_FILES))
    tables = [_read_table(path) for path in files]
    lengths = [entry["tokens"] for table in tables for entry in table]
    home = {n: to for to, part in enumerate(partition(lengths, world)) for n in part}
    found: dict[tuple[int, int], Episode] = {}
    for path, table in zip(files, tables, strict=True):
        with safe_open(path, framework="pt") as file:
            for place, entry in enumerate(table):
                episode = _episode(file, place, entry, home[len(found)])
                if episode.home == rank:
                    episode = replace(episode, tokens=_tokens(file, place, entry))
                found[entry["uid"], entry["sample"]] = episode
    return found


def _read_table(path: Path) -> list[dict[str, Any]]:
    """The fields of a file's responses that are no tensors, and their numbers of tokens."""
    header = read_header(path)
    with safe_open(path, framework="pt") as file:
        table = parse_json(file.metadata()[_TABLE])
    for place, entry in enumerate(table):
        entry["tokens"] = math.prod(header[f"{place}/response_ids"].shape)
        experts = header.get(f"{place}/routed_experts")
        entry["routed"] = None if experts is None else experts.shape
    return table


def _episode(file: Any, place: int, entry: Mapping[str, Any], home: int) -> Episode:
    earlier = tuple((version, tokens) for version, tokens in entry["earlier"])
    last = entry["tokens"] - sum(tokens for _, tokens in earlier)
    prompt = Prompt(entry["uid"], file.get_tensor(f"{place}/prompt_ids"), "", "", "")
    parts = (*earlier, (entry["weight_version"], last))
    return Episode(prompt, parts, entry["finish_reason"], home, entry["routed"])


def _tokens(file: Any, place: int, entry: Mapping[str, Any]) -> EpisodeTokens:
    experts = file.get_tensor(f"{place}/routed_experts") if entry["routed"] else None
    ids, logprobs = (file.get_tensor(f"{place}/{name}") for name in ("response_ids", "logprobs"))
    return EpisodeTokens(ids, logprobs, experts)
