"""The verdict: whether a rank fits its GPU, including memory outside torch's allocator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mppo.config.rules.rule import roles_in_use
from mppo.config.schema import Recipe
from mppo.planning.memory import BYTES
from mppo.planning.outside import CUDA_CONTEXT, NCCL_COMMUNICATOR
from mppo.simulation.gpu.gpu_types import GIB, GpuType
from mppo.simulation.rank import RankResult
from mppo.weights.shape import ModelShape

ENGINE_GRAPHS = int(1.5 * GIB)
"""Bytes of an SGLang server's CUDA graphs and workspaces per GPU; it keeps them asleep."""
LEAST_SEQUENCES = 8
"""Number of sequences of the greatest length for which a server's KV cache must have room."""


@dataclass(frozen=True)
class Moment:
    """Memory of a GPU at the peak of a phase.

    Args:
        phase: name of the phase.
        trainer: bytes of the trainer's tensors.
        beside: bytes of all other memory, by purpose.
    """

    phase: str
    trainer: int
    beside: Mapping[str, int]

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.trainer + sum(self.beside.values())


@dataclass(frozen=True)
class Verdict:
    """Whether a rank fits.

    Args:
        gpu: the type of the GPU.
        moments: the peaks of all phases, the largest first.
        kv_tokens: number of tokens for which the engine's KV cache has room during generation; None
            if the engine is on other GPUs.
        fixes: changes to the recipe with the GiB that they free; empty if the rank fits.
    """

    gpu: GpuType
    moments: tuple[Moment, ...]
    kv_tokens: int | None
    fixes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the largest moment fits the GPU's memory."""
        return self.moments[0].total <= self.gpu.nbytes


def judge_fit(
    result: RankResult, recipe: Recipe, actor: ModelShape, parameters: int, gpu: GpuType
) -> Verdict:
    """Judge whether a simulated rank fits its GPU.

    Args:
        result: the result of the simulation.
        recipe: the recipe.
        actor: shape of the actor's model.
        parameters: number of parameters of the complete actor model.
        gpu: the type of the GPU.
    """
    fixed = {
        "CUDA context": CUDA_CONTEXT,
        "NCCL": result.groups * NCCL_COMMUNICATOR,
    }
    engine = _engine(recipe, parameters)
    asleep = {key: size for key, size in engine.items() if key != "engine's weights"}
    moments = []
    for phase in result.phases:
        beside = engine if phase.name == "weight sync" else asleep
        moments.append(Moment(phase.name, phase.peak, {**fixed, **beside}))
    kv_tokens = None
    if engine:
        resident = result.resident.total()
        per_token = _kv_bytes_per_token(recipe, actor)
        longest = recipe.data.max_prompt_length + recipe.data.max_response_length
        cache = LEAST_SEQUENCES * longest * per_token
        beside = {**fixed, **engine, f"KV cache of {LEAST_SEQUENCES} sequences": cache}
        moments.append(Moment("generation", resident, beside))
        free = gpu.nbytes - moments[-1].total + cache
        kv_tokens = max(0, free // per_token)
    moments.sort(key=lambda moment: -moment.total)
    over = moments[0].total - gpu.nbytes
    fixes = _fixes(result, recipe, moments[0], over) if over > 0 else ()
    return Verdict(gpu, tuple(moments), kv_tokens, fixes)


def _engine(recipe: Recipe, parameters: int) -> dict[str, int]:
    """Bytes of a colocated engine per GPU, by purpose; empty if it is on other GPUs."""
    rollout = recipe.rollout
    if rollout.mode != "colocated" or rollout.urls:
        return {}
    if rollout.name == "local":  # gathers the actor's weights into a model of its own
        return {"engine's weights": parameters * BYTES[rollout.dtype or recipe.model.dtype]}
    width = BYTES[rollout.dtype or recipe.model.dtype]
    return {
        "engine's weights": parameters * width // rollout.tensor_model_parallel_size,
        "engine's graphs": ENGINE_GRAPHS,
        "engine's CUDA context": CUDA_CONTEXT,
    }


def _kv_bytes_per_token(recipe: Recipe, shape: ModelShape) -> int:
    width = BYTES[recipe.rollout.dtype or recipe.model.dtype]
    if shape.mla is not None:  # SGLang keeps the compressed form, replicated on every rank
        return shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim) * width
    heads = max(1, shape.kv_heads // recipe.rollout.tensor_model_parallel_size)
    return 2 * shape.num_layers * heads * shape.head_dim * width


def _fixes(result: RankResult, recipe: Recipe, moment: Moment, over: int) -> tuple[str, ...]:
    """List changes to the recipe that free memory, the most effective first."""
    found: list[tuple[int, str]] = []
    phase = next((p for p in result.phases if p.name == moment.phase), None)
    held = phase.composition if phase is not None else result.resident
    roles = [
        name
        for name in ("actor", "critic", "ref", "reward_model")
        if any(k.startswith(name) for k in held)
    ]
    for role in roles:
        size = sum(n for key, n in held.items() if key.startswith(f"{role} "))
        key = f"{role}.megatron.tensor_model_parallel_size or pipeline_model_parallel_size"
        found.append((size // 2, f"double {key}: {role} holds {size / GIB:.1f} GiB here"))
    if phase is not None and phase.name.startswith(("updating", "computing")):
        size = held[phase.name]
        role = next(
            (name for name in roles if name in phase.name.replace(",", "").split()), "actor"
        )
        section = next(case.section for case in roles_in_use(recipe) if case.name == role)
        key, value = "ppo_micro_batch_size_per_gpu", section.ppo_micro_batch_size_per_gpu
        if section.use_dynamic_bsz:
            key, value = "ppo_max_token_len_per_gpu", section.ppo_max_token_len_per_gpu
        if phase.name.startswith("computing"):
            key = f"log_prob_{key.removeprefix('ppo_')}"
        if role == "reward_model":
            key = key.removeprefix("log_prob_").replace("max_token", "forward_max_token")
        found.append(
            (size // 2, f"halve {role}.{key} ({value}): activations are {size / GIB:.1f} GiB")
        )
    engine = sum(size for key, size in moment.beside.items() if key.startswith("engine"))
    if engine:
        size = moment.beside.get("engine's weights", 0)
        if size:
            key = "rollout.tensor_model_parallel_size"
            found.append(
                (size // 2, f"double {key}: the engine's weights are {size / GIB:.1f} GiB")
            )
        found.append((engine, "rollout.mode=disaggregated: the engine on GPUs of its own"))
    found.sort(reverse=True)
    return tuple(
        f"{text}; frees {size / GIB:.1f} GiB" + ("" if size >= over else ", not enough by itself")
        for size, text in found
    )
