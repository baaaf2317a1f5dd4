"""The verdict: whether a rank fits its GPU in every phase, with everything that is beside the
trainer's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mppo.planning.outside import Engine, outside_bytes
from mppo.planning.peaks import RankUse
from mppo.planning.residency import GENERATION, WEIGHT_SYNC, Residency
from mppo.recipe.gpu_types import GIB, GpuType
from mppo.recipe.rules.engine_rules import sglang_options
from mppo.recipe.schema import Recipe

CHECKPOINT = "checkpoint state"
"""Name of the phase in which a checkpoint is written, from where the parts are in generation."""
EXIT_TOO_LARGE = 3
"""Exit code of a dry run or a simulation if a rank does not fit its GPU, or the run its hosts."""


@dataclass(frozen=True)
class Moment:
    """Memory of a GPU at the peak of a phase.

    Args:
        held: bytes of the parts of each role.
        idle: those of them that the phase does not use.
        passes: bytes of its activations.
    """

    phase: str
    trainer: int
    beside: Mapping[str, int]
    held: Mapping[str, int]
    idle: Mapping[str, int]
    role: str | None = None
    passes: int = 0
    training: bool = False

    @property
    def total(self) -> int:
        return self.trainer + sum(self.beside.values())


@dataclass(frozen=True)
class Verdict:
    """Whether a rank fits.

    Args:
        moments: the peaks of all phases, the largest first.
        kv_tokens: tokens for which the engine's KV cache has room during generation.
        fixes: changes to the recipe with the GiB that they free; empty if the rank fits.
    """

    gpu: GpuType
    moments: tuple[Moment, ...]
    engine: Engine | None
    kv_tokens: int | None
    fixes: tuple[str, ...]

    @property
    def over(self) -> int:
        """Bytes that the largest moment lacks; negative if it has more than it needs."""
        return self.moments[0].total - self.gpu.nbytes

    @property
    def lacking_tokens(self) -> int:
        """Tokens that the KV cache lacks; at most 0 if it has room enough."""
        if self.engine is None or self.kv_tokens is None:
            return 0
        return self.engine.sequences * self.engine.longest - self.kv_tokens

    @property
    def fits(self) -> bool:
        """Whether every phase fits the GPU's memory, the KV cache included."""
        return self.over <= 0 and self.lacking_tokens <= 0


def beside_trainer(phase: str, outside: Mapping[str, int], engine: Engine | None) -> dict[str, int]:
    """Bytes of a GPU besides the trainer's tensors in a phase.

    The engine starts when all roles are built, and sleeps while a checkpoint is loaded. It has its
    weights from the weight sync on, when a checkpoint is written, and its KV cache while it
    generates, and while the reward model scores responses before it generates more (validation).
    """
    if engine is None or phase.startswith("building"):
        return dict(outside)
    if phase == GENERATION or phase.endswith("reward_model"):
        return {**outside, **engine.generating}
    if phase in (WEIGHT_SYNC, CHECKPOINT):
        return {**outside, **engine.with_weights}
    return {**outside, **engine.asleep}


def planned_moments(
    use: RankUse, table: Residency, engine: Engine | None, everything: Residency
) -> list[Moment]:
    """The moments of a planned rank; ``everything`` is its table if all parts were offloaded."""
    outside, moments = outside_bytes(use.communicators), list[Moment]()
    for one in use.uses:
        held, needed = use.held(one, table), use.held(one, everything)
        idle = {name: size - needed[name] for name, size in held.items()}
        beside = beside_trainer(one.name, outside, engine)
        training = one.name.startswith("updating")
        moments.append(
            Moment(
                *(one.name, use.peak(one, table), beside, held, idle),
                *(one.role, one.extra, training),
            )
        )
    return moments


def judge(
    moments: Sequence[Moment], recipe: Recipe, gpu: GpuType, engine: Engine | None
) -> Verdict:
    """Judge whether a rank fits its GPU; one of the moments is called "generation"."""
    ordered = sorted(moments, key=lambda moment: -moment.total)
    tokens = None
    if engine is not None and engine.kv_per_token:
        moment = next(moment for moment in moments if moment.phase == GENERATION)
        taken = moment.total - engine.weights - engine.cache
        tokens = engine.kv_tokens(gpu.nbytes - taken)
    found = Verdict(gpu, tuple(ordered), engine, tokens, ())
    if found.fits:
        return found
    fixes = _fixes(ordered[0], recipe, found.over) if found.over > 0 else _cache_fixes(recipe)
    return Verdict(gpu, tuple(ordered), engine, tokens, fixes)


def _cache_fixes(recipe: Recipe) -> tuple[str, ...]:
    """Changes for a KV cache that is too small although the GPU has free memory."""
    share = sglang_options(recipe.rollout.server_args).get("mem_fraction_static", "not set")
    return (
        f"raise rollout.server_args.mem_fraction_static ({share}): the share of the memory that is "
        "free while the engine starts which its weights and KV cache take",
        "double rollout.tensor_model_parallel_size: each GPU holds half of the weights",
    )


def _fixes(moment: Moment, recipe: Recipe, over: int) -> tuple[str, ...]:
    """List changes to the recipe that free memory, the most effective first."""
    found = [*_offload_fixes(moment, recipe), *_role_fixes(moment, recipe)]
    engine = {name: n for name, n in moment.beside.items() if "engine" in name or "KV" in name}
    if engine:
        size = engine.get("engine's weights", 0)
        if size:
            key = "rollout.tensor_model_parallel_size"
            found.append(
                (size // 2, f"double {key}: the engine's weights are {size / GIB:.1f} GiB")
            )
        where = "rollout.mode=disaggregated: the engine on GPUs of its own"
        found.append((sum(engine.values()), where))
    found.sort(reverse=True)
    return tuple(
        f"{text}; frees {size / GIB:.1f} GiB" + ("" if size >= over else ", not enough by itself")
        for size, text in found
    )


def _offload_fixes(moment: Moment, recipe: Recipe) -> list[tuple[int, str]]:
    """Offload of parts that the phase does not use; roles that need not be trained together."""
    found = [
        (size, f"{role}.megatron.offload=auto: {role} is not used here")
        for role, size in moment.idle.items()
        if size
    ]
    others = [
        moment.held[name]
        for name in ("actor", "critic")
        if moment.training and name != moment.role and moment.held.get(name)
        and not moment.idle.get(name)
    ]  # fmt: skip
    if others and recipe.trainer.schedule != "sequential" and not recipe.trainer.align_overflow:
        text = "trainer.schedule=sequential: critic and actor are trained one after the other"
        found.append((max(others), text))
    return found


def _role_fixes(moment: Moment, recipe: Recipe) -> list[tuple[int, str]]:
    """Wider layouts of the roles that are here, and smaller micro-batches of the one that
    computes."""
    found: list[tuple[int, str]] = []
    for role, size in moment.held.items():
        key = f"{role}.megatron.tensor_model_parallel_size or pipeline_model_parallel_size"
        if size:
            found.append((size // 2, f"double {key}: {role} holds {size / GIB:.1f} GiB here"))
    if moment.role is not None and not moment.phase.startswith("building"):
        section = next(case.batching for case in recipe.roles() if case.name == moment.role)
        key, value = "ppo_micro_batch_size_per_gpu", section.ppo_micro_batch_size_per_gpu
        if section.use_dynamic_bsz:
            key, value = "ppo_max_token_len_per_gpu", section.ppo_max_token_len_per_gpu
        if moment.role == "reward_model":
            key = key.removeprefix("ppo_").replace("max_token", "forward_max_token")
        elif not moment.training:
            key = f"log_prob_{key.removeprefix('ppo_')}"
            value = getattr(section, key) or value
        size = moment.passes
        text = f"halve {moment.role}.{key} ({value}): activations are {size / GIB:.1f} GiB"
        found.append((size // 2, text))
    return found


def describe_verdict(verdict: Verdict) -> str:
    """Describe whether the rank fits, its largest moment, and the fixes if it does not fit."""
    moment, gpu = verdict.moments[0], verdict.gpu
    beside = ", ".join(f"{key} {_gib(size)}" for key, size in moment.beside.items())
    lines = [
        f"largest moment: {moment.phase}: {_gib(moment.total)} GiB of {_gib(gpu.nbytes)} GiB "
        f"({gpu.name}): trainer {_gib(moment.trainer)}, {beside}"
    ]
    if verdict.kv_tokens is not None:
        lines.append(
            f"room for the engine's KV cache while it generates: {verdict.kv_tokens:,} tokens"
        )
    if verdict.fits:
        lines.append(f"fits, with {_gib(-verdict.over)} GiB to spare")
        return "\n".join(lines)
    if verdict.over > 0:
        lines.append(f"does NOT fit: {_gib(verdict.over)} GiB too much. What would help:")
    else:
        assert verdict.engine is not None
        lines.append(
            f"does NOT fit: the KV cache lacks room for {verdict.lacking_tokens:,} tokens of "
            f"{verdict.engine.sequences} sequences of {verdict.engine.longest}. What would help:"
        )
    return "\n".join([*lines, *(f"  - {fix}" for fix in verdict.fixes)])


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"
