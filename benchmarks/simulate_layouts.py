"""Random layouts of small models, whose ranks are simulated together.

    python benchmarks/simulate_layouts.py [--seeds SEED ...] [--minutes M] [--at-once N]
        [--out FILE]

Every seed draws a valid recipe: model, world size, PP, VPP, TP, CP, EP and ETP of actor and critic,
micro-batches, mini-batches, offload, schedule, recorded timelines, router replay, where SGLang
runs. A finding (a mismatch, a race, a hang) or an error of the simulated code fails; exit code 1.
"""

from __future__ import annotations

import math
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
import transformers
from mppo_simulate.case import RankCase
from mppo_simulate.isolated import SimulationError
from mppo_simulate.quick import with_layers
from mppo_simulate.run import import_simulated_code
from mppo_simulate.together.choice import representative_ranks
from mppo_simulate.together.findings import find
from mppo_simulate.together.together_run import record_ranks, rules_of

from mppo.recipe.errors import ConfigError
from mppo.recipe.gpu_types import find_gpu
from mppo.recipe.schema import Recipe
from mppo.trainer.start.loading import load_checked

BASE = Path(__file__).parents[1] / "recipes" / "qwen2_7b_seq_balance.yaml"
LAYERS = 840
"""Of the model that the recipe is checked with, a multiple of all PP x VPP; the simulated one has
one or two layers in every chunk."""
SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": LAYERS, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {**SIZES, "moe_intermediate_size": 64, "num_experts_per_tok": 3, "norm_topk_prob": True}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "dense": (transformers.Qwen2Config, SIZES),
    "experts": (transformers.Qwen3MoeConfig, {**EXPERTS, "num_experts": 16, "head_dim": 16}),
    "latent": (transformers.DeepseekV3Config, {
        **EXPERTS, "num_key_value_heads": 8, "kv_lora_rank": 32, "q_lora_rank": None,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 16,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    }),
}  # fmt: skip
KINDS = ("error", "mismatches", "races", "hangs")
MOVED = "{parameters: true, gradients: true, optimizer: true}"


def drawn(seed: int) -> tuple[str, int, list[str]]:
    """Draw settings until they are valid.

    Returns:
        Name of the model, number of ranks, and keys of the recipe.
    """
    rng = random.Random(seed)
    while True:
        model, world = rng.choice(list(MODELS)), rng.choice([2, 4, 4, 8, 8, 16])
        keys = list(_draw(rng, model, world))
        try:
            checked(model, world, keys)
        except ConfigError:
            continue
        return model, world, keys


def checked(model: str, world: int, keys: list[str]) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with these keys, and every role's config.

    Raises:
        ConfigError: the keys do not fit each other.
    """
    config, sizes = MODELS[model]
    recipe = load_checked(BASE, keys, world, lambda *path: config(**sizes), files=False)
    return recipe, {role.name: config(**sizes) for role in recipe.roles()}


def _draw(rng: random.Random, model: str, world: int) -> Iterator[str]:
    """Settings, which need not fit each other."""
    sparse = model != "dense"
    actor = _layout(rng, world, sparse)
    critic = actor if rng.random() < 0.7 else _layout(rng, world, sparse)
    micro_batch = rng.choice([1, 1, 2])
    sequences = math.lcm(*(world // (tp * pp * cp) for tp, pp, _, cp, *_ in (actor, critic)))
    mini = sequences * micro_batch * rng.choice([1, 2, 3, 5])
    yield f"trainer.n_gpus_per_node={min(world, 8)}"
    yield f"trainer.nnodes={max(1, world // 8)}"
    yield f"data.train_batch_size={mini * rng.choice([1, 2, 3])}"
    yield from ("rollout.n=1", "data.max_prompt_length=40", "data.max_response_length=60")
    yield f"trainer.schedule={rng.choice(['auto', 'auto', 'sequential', 'fused', 'flush_free'])}"
    if rng.random() < 0.25:
        yield "trainer.timeline.steps=[1]"
    if rng.random() < 0.3:
        yield "actor.use_kl_loss=true"
    if rng.random() < 0.5:
        yield from ("rollout.mode=disaggregated", "rollout.urls=[http://elsewhere:30000]")
    if sparse and rng.random() < 0.4:
        yield f"actor.router_replay={rng.choice(['R2', 'R3'])}"
    dynamic = rng.random() < 0.3
    for role, (tp, pp, vpp, cp, ep, etp) in (("actor", actor), ("critic", critic)):
        key = f"{role}.megatron"
        yield f"{role}.ppo_mini_batch_size={mini}"
        yield f"{role}.use_dynamic_bsz={str(dynamic).lower()}"
        if dynamic:
            yield f"{role}.ppo_max_token_len_per_gpu={100 * micro_batch}"
        yield f"{role}.ppo_micro_batch_size_per_gpu={micro_batch}"
        yield f"{key}.tensor_model_parallel_size={tp}"
        yield f"{key}.pipeline_model_parallel_size={pp}"
        yield f"{key}.virtual_pipeline_model_parallel_size={vpp if vpp > 1 else 'null'}"
        yield f"{key}.context_parallel_size={cp}"
        yield f"{key}.expert_model_parallel_size={ep}"
        yield f"{key}.expert_tensor_parallel_size={etp}"
        yield f"{key}.offload={rng.choice(['auto', 'none', MOVED])}"
        yield f"{key}.offload_activations={rng.choice(['false', 'true'])}"
        yield f"{key}.recompute_granularity={rng.choice(['none', 'selective', 'full'])}"
        if rng.random() < 0.2:
            yield f"{key}.use_distributed_optimizer=false"
        if sparse and rng.random() < 0.2:
            yield f"{key}.moe_token_dispatcher_type=allgather"
        if sparse and rng.random() < 0.2:
            yield f"{key}.moe_expert_capacity_factor=1.0"


def _layout(rng: random.Random, world: int, sparse: bool) -> tuple[int, ...]:
    """TP, PP, VPP, CP, EP, ETP."""
    tp, cp = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 1, 2])
    pp = rng.choice([1, 2, 2, 3, 4, 4, 6, 8])
    vpp = rng.choice([1, 1, 2, 3])
    ep, etp = (rng.choice([1, 2, 4]), rng.choice([1, 1, 2])) if sparse else (1, 1)
    return tp, pp, vpp, cp, ep, etp


def simulated(seed: int, at_once: int) -> dict[str, Any]:
    """What is found among the ranks of a seed's layout."""
    model, world, keys = drawn(seed)
    recipe, hf_configs = checked(model, world, keys)
    roles = recipe.roles()
    row: dict[str, Any] = {
        "seed": seed,
        "model": model,
        "layouts": {role.name: role.megatron.layout(world).describe() for role in roles},
        "keys": keys,
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryDirectory() as folder:
        trainer = recipe.trainer.model_copy(update={"default_local_dir": folder})
        placed = recipe.model_copy(update={"trainer": trainer})
        case = RankCase(placed, hf_configs, world, 0, 1, find_gpu("h100-80gb"))
        case = with_layers(case, 2 if model == "latent" else 1)
        ranks = representative_ranks(recipe, world)
        try:
            records = list(record_ranks(case, ranks, at_once))
        except SimulationError as error:
            return row | {"ranks": len(ranks), "error": str(error), "stack": error.stack}
    found = find(records, rules_of(recipe, world))
    return row | {
        "ranks": len(ranks),
        "processor_s": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before),
        "mismatches": [one.describe() for one in found.mismatches],
        "races": found.races,
        "hangs": [one.describe() for one in found.hangs],
    }


def failed(row: dict[str, Any]) -> bool:
    """Whether something is found in a layout."""
    return any(row.get(kind) for kind in KINDS)


def main() -> int:
    parser = record.parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="*", default=range(200), help="default 0 to 199")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after this")
    parser.add_argument("--at-once", type=int, default=2, help="ranks simulated at once")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import_simulated_code()
    rows, end = [], time.monotonic() + 60 * arguments.minutes
    for seed in arguments.seeds:
        if time.monotonic() > end:
            break
        row = simulated(seed, arguments.at_once)
        rows.append(row)
        text = " | ".join(f"{name} {layout}" for name, layout in row["layouts"].items())
        what = "fails" if failed(row) else "passes"
        print(f"{seed} {what}: {row['model']}, {text}", file=sys.stderr, flush=True)
        for one in (row.get(kind) for kind in KINDS if row.get(kind)):
            print(one, file=sys.stderr, flush=True)
    bad = [row for row in rows if failed(row)]
    sizes = Counter(text for row in rows for text in set(row["layouts"].values()))
    measured = {
        "layouts": len(rows),
        "failed": len(bad),
        "ranks": sum(row["ranks"] for row in rows),
        "processor_s": sum(row.get("processor_s", 0) for row in rows),
        "by_layout": dict(sorted(sizes.items())),
        "failures": bad,
    }
    record.record(measured, arguments.out)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
