"""Responses packed into one int32 tensor, for the exchange between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mppo.batch import Trajectory
from mppo.rollout.engine import GenerationRequest

FINISH = ("length", "stop", "abort")
"""Finish reasons; a packed row holds the index of its own."""


def pack_rows(
    key_R: Tensor, length_R: Tensor, finish_R: Tensor, tokens: Tensor, logprobs: Tensor
) -> Tensor:
    """Pack a rank's responses into one int32 tensor.

    Args:
        key_R: ``prompt index * n + sample`` of each row.
        length_R: tokens of each row.
        finish_R: finish reason of each row, as its index in ``FINISH``.
        tokens: token ids of all rows, concatenated.
        logprobs: log-probabilities of the same tokens, float32.

    Returns:
        int32: row count; keys, lengths, finish reasons; tokens; bits of the log-probabilities.
    """
    count = torch.tensor([len(key_R)], dtype=torch.int32, device=key_R.device)
    head = torch.stack([key_R, length_R, finish_R.to(key_R.dtype)]).int().flatten()
    return torch.cat([count, head, tokens.int(), logprobs.float().view(torch.int32)])


def unpack_rows(packed: Tensor, request: GenerationRequest, version: int) -> dict[int, Trajectory]:
    """Unpack trajectories, by ``prompt index * n + sample``; the inverse of ``pack_rows``.

    Raises:
        ValueError: a log-probability is not finite. All ranks unpack the same rows, so all raise.
    """
    packed = packed.cpu()
    rows = int(packed[0])
    keys, lengths, finish = packed[1 : 1 + 3 * rows].view(3, rows).tolist()
    body = packed[1 + 3 * rows :]
    half = len(body) // 2
    values = body[half:].view(torch.float32)
    _check_finite(values, keys, lengths, request, version)
    parts = zip(keys, finish, body[:half].split(lengths), values.split(lengths), strict=True)
    return {
        key: Trajectory(
            prompt=request.sample_at(key)[0],
            response_ids=tokens,
            logprobs=logprobs,
            finish_reason=FINISH[reason],
            weight_version=version,
        )
        for key, reason, tokens, logprobs in parts
    }


def _check_finite(
    values: Tensor,
    keys: Sequence[int],
    lengths: Sequence[int],
    request: GenerationRequest,
    version: int,
) -> None:
    if bool(values.isfinite().all()):
        return
    bad = int((~values.isfinite()).nonzero()[0])
    row = int(torch.searchsorted(torch.tensor(lengths).cumsum(0), bad, right=True))
    prompt, _ = request.sample_at(keys[row])
    raise ValueError(
        f"rollout: log-probability {values[bad].item()} in the response to prompt "
        f"{prompt.uid}: the weights of version {version} hold NaN or overflow "
        "(look at actor/grad_norm and lower actor.optim.lr, or use model.dtype = bfloat16 or "
        "float32)"
    )
