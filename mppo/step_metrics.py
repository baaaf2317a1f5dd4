"""Metrics of a whole step: how fast it was, and how far engine and actor are apart."""

from __future__ import annotations

import psutil
import torch

from mppo.algos.masked import sequence_sum
from mppo.batch import Batch, Measured
from mppo.config.schema import DataConfig
from mppo.parallel import device
from mppo.parallel.balance import balance_metrics
from mppo.run import Run


def mismatch(measured: Measured, step: int) -> dict[str, float]:
    """How far the engine's probabilities are from the actor's, and its weights behind, over
    response tokens; the first only where the actor was measured."""
    batch = measured.batch
    inside = batch.response_mask_T > 0
    if not inside.any():
        return {}
    lag = step - 1 - batch.weight_version_T[inside]
    lags = {
        "training/weight_version_lag_max": float(lag.max()),
        "training/weight_version_lag_mean": float(lag.double().mean()),
    }
    if measured.logprobs_T is batch.rollout_logprobs_T:
        return lags
    gap = (measured.logprobs_T - batch.rollout_logprobs_T)[inside].abs()
    return lags | {
        "training/rollout_logprob_diff_mean": gap.mean().item(),
        "training/rollout_logprob_diff_max": gap.max().item(),
    }


def longest_prompts(batch: Batch, data: DataConfig) -> float:
    """Share of the prompts that have ``data.max_prompt_length`` tokens."""
    prompt_B = batch.lengths_B - sequence_sum(batch.value_mask_T, batch.cu_seqlens)
    return (prompt_B >= data.max_prompt_length).float().mean().item()


def performance(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Seconds by stage, tokens per second, memory."""
    seconds = sum(run.seconds.values())
    tokens, lengths = len(batch.tokens_T), batch.lengths_B.tolist()
    responses = max(float(batch.response_mask_T.sum()), 1.0)
    per_token = {"gen": responses}
    timed = run.seconds | run.roles.seconds
    metrics = {f"timing_s/{name}": value for name, value in timed.items()}
    metrics |= {
        f"timing_per_token_ms/{name}": 1e3 * value / per_token.get(name, tokens)
        for name, value in timed.items()
    }
    metrics |= balance_metrics(lengths, run.roles.actor.layout.dp)
    return metrics | {
        "episode": float(step * batch.num_sequences),
        "eps": batch.num_sequences / seconds,
        "lr": run.roles.actor.optimizer.learning_rate,
        "timing_s/step": seconds,
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / torch.distributed.get_world_size(),
        "perf/tokens_per_second": tokens / seconds,
        "perf/max_memory_allocated_gb": device.peak_memory_bytes() / 2**30,
        "perf/max_memory_reserved_gb": device.peak_reserved_bytes() / 2**30,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
        "training/global_step": float(step),
        "training/epoch": run.prompts.epoch,
        "training/skipped_steps": float(run.roles.skipped_steps),
    }
