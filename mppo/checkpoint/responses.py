"""Responses that no step has trained on yet, as one safetensors file of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from mppo.batch import Prompt, ResponsesBySample, Trajectory
from mppo.safety.input_files import parse_json
from mppo.weights.hf.safetensors_file import read_header

FILE = "responses.safetensors"
_TABLE = "responses"


def to_bytes(partial: ResponsesBySample) -> bytes:
    """Serialise partial responses.

    For response r the file has ``r/prompt_ids`` and ``r/response_ids`` (int64), ``r/logprobs``
    (float32, as in a batch) and, if known, ``r/routed_experts`` (int16 ``[tokens, layers, k]``);
    all other fields are a JSON table in the header.
    """
    tensors: dict[str, Tensor] = {}
    table = []
    for row, ((uid, sample), response) in enumerate(partial.items()):
        tensors[f"{row}/prompt_ids"] = response.prompt.token_ids.long()
        tensors[f"{row}/response_ids"] = response.response_ids.long()
        tensors[f"{row}/logprobs"] = response.logprobs.clone()
        if response.routed_experts is not None:
            tensors[f"{row}/routed_experts"] = response.routed_experts.clone()
        table.append(
            {
                "uid": uid,
                "sample": sample,
                "finish_reason": response.finish_reason,
                "weight_version": response.weight_version,
                "earlier": response.earlier,
            }
        )
    return save(tensors, metadata={_TABLE: json.dumps(table)})


def load_responses(folder: Path) -> ResponsesBySample:
    """Load the responses of a checkpoint; none if it has no such file.

    Their prompts have only uid and tokens; ``GenerationRequest.resumed`` replaces them by the full
    prompts.

    Raises:
        ValueError, KeyError, TypeError: the file does not hold such responses.
    """
    if not (folder / FILE).exists():
        return {}
    partial: ResponsesBySample = {}
    read_header(folder / FILE)
    with safe_open(folder / FILE, framework="pt") as file:
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        table = parse_json(file.metadata()[_TABLE])
    for row, entry in enumerate(table):
        uid, sample = entry.pop("uid"), entry.pop("sample")
        partial[uid, sample] = Trajectory(
            prompt=Prompt(uid, tensors[f"{row}/prompt_ids"], "", "", ""),
            response_ids=tensors[f"{row}/response_ids"],
            logprobs=tensors[f"{row}/logprobs"],
            routed_experts=tensors.get(f"{row}/routed_experts"),
            earlier=tuple(map(tuple, entry.pop("earlier"))),
            **entry,
        )
    return partial
