"""What an engine refuses when it starts is refused before any model is built: one row per rule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mppo.recipe.checks import check_recipe
from mppo.recipe.load import load_recipe

DENSE = SimpleNamespace(
    model_type="llama", hidden_size=48, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=12, num_key_value_heads=6, vocab_size=101, max_position_embeddings=2048,
    tie_word_embeddings=False,
)  # fmt: skip
MOE = SimpleNamespace(**{
    **vars(DENSE), "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 18, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
})  # fmt: skip
NARROW = SimpleNamespace(**{**vars(DENSE), "intermediate_size": 97})
TP, EP = "rollout.tensor_model_parallel_size", "rollout.expert_parallel_size"
ELSEWHERE = ("rollout.mode=disaggregated", "rollout.urls=[http://a]")

# the model, settings, key, why
REFUSED = {
    "checksums by disk": (
        DENSE, ["rollout.verify_sync=checksum", "rollout.sync=disk"], "rollout.verify_sync",
        "needs rollout.sync = tensor, not disk",
    ),
    "checksums by external servers": (
        DENSE, ["rollout.verify_sync=checksum", *ELSEWHERE], "rollout.verify_sync",
        "servers that the run starts itself",
    ),
    "a weight loader of the user's": (
        DENSE, ['rollout.server_args={"custom-weight-loader": ["x.load"]}'],
        "rollout.server_args.custom_weight_loader", "is set by mppo",
    ),
    "one random seed for all servers": (
        DENSE, ["rollout.server_args={random-seed: 7}"],
        "rollout.server_args.random_seed", "is set by mppo",
    ),
    "replicas with one random seed": (
        DENSE, ["rollout.server_args={dp-size: 2}"],
        "rollout.server_args.dp_size", "draw equal random numbers",
    ),
    "a server that cannot sleep": (
        DENSE, ["rollout.server_args={enable-memory-saver: false}"],
        "rollout.server_args.enable_memory_saver", "could release nothing",
    ),
    "graphs that cannot be released": (
        DENSE, ["rollout.server_args={cuda_graph_backend_prefill: breakable}"],
        "rollout.server_args.cuda_graph_backend_prefill", "does not start with breakable graphs",
    ),
    "experts that are not returned": (
        MOE,
        ["actor.router_replay=R3", "rollout.server_args={enable-return-routed-experts: false}"],
        "rollout.server_args.enable_return_routed_experts", "actor.router_replay = R3",
    ),
    "key-value heads": (DENSE, [f"{TP}=4"], TP, "neither divides the 6 key-value heads"),
    "the feed-forward": (
        NARROW, [f"{TP}=2"], TP, "cuts the feed-forward width, 97, into 2 unequal parts"
    ),
    "an expert": (MOE, [f"{TP}=12"], TP, "cuts the width of an expert, 18, into 12 unequal parts"),
}  # fmt: skip

ACCEPTED = {
    "checksums by own servers": (DENSE, ["rollout.verify_sync=checksum"]),
    "breakable graphs elsewhere": (
        DENSE, ["rollout.server_args={cuda_graph_backend_prefill: breakable}", *ELSEWHERE]
    ),
    "repeated key-value heads": (DENSE, [f"{TP}=12"]),
    "experts divided among groups": (MOE, [f"{TP}=12", f"{EP}=4"]),
    "a feed-forward cut otherwise": (
        NARROW, [f"{TP}=2", "rollout.server_args={moe-dense-tp-size: 1}"]
    ),
}  # fmt: skip


def issues(config: SimpleNamespace, settings: list[str]):
    algorithm = "algorithm.adv_estimator=reinforce_plus_plus"
    recipe = load_recipe(
        None, ["data.task=arithmetic", algorithm, "rollout.name=sglang", *settings]
    )
    return check_recipe(recipe, 12, {"actor": config})


@pytest.mark.parametrize("name", REFUSED)
def test_an_engine_that_would_not_start_is_refused(name: str) -> None:
    config, settings, key, why = REFUSED[name]
    (issue,) = issues(config, settings)
    assert issue.key == key
    assert why in issue.why
    assert issue.fix


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_engine_that_starts_is_accepted(name: str) -> None:
    assert issues(*ACCEPTED[name]) == []
