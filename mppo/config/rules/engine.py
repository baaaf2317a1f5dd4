"""Rules about the engine that generates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mppo.config.errors import ConfigIssue
from mppo.config.rules.layout import divisors
from mppo.config.rules.rule import RuleContext, rule
from mppo.safety.bounded_http import url_problem


@rule("rollout")
def local_engine_obeys_its_keys(case: RuleContext) -> Iterator[ConfigIssue]:
    """The local engine lives on each rank; keys of a server would be ignored."""
    rollout = case.recipe.rollout
    if rollout.name != "local":
        return
    why = "has no effect with rollout.name = local"
    fix = "leave it out, or set rollout.name to sglang"
    if rollout.tensor_model_parallel_size > 1:
        size = rollout.tensor_model_parallel_size
        yield ConfigIssue("rollout.tensor_model_parallel_size", size, why, fix)
    if rollout.expert_parallel_size > 1:
        yield ConfigIssue("rollout.expert_parallel_size", rollout.expert_parallel_size, why, fix)
    if rollout.mode != "colocated":
        yield ConfigIssue("rollout.mode", rollout.mode, why, fix)
    if rollout.urls:
        yield ConfigIssue("rollout.urls", list(rollout.urls), why, fix)
    if rollout.server_args:
        yield ConfigIssue("rollout.server_args", rollout.server_args, why, fix)
    if rollout.over_sampling:
        yield ConfigIssue("rollout.over_sampling", rollout.over_sampling, why, fix)


@rule("rollout.urls", "rollout.mode", "rollout.name")
def servers_are_named_where_they_run_apart(case: RuleContext) -> Iterator[ConfigIssue]:
    """Servers elsewhere are named by address; servers on the training ranks are started here."""
    rollout = case.recipe.rollout
    if rollout.name != "sglang":
        return
    if rollout.mode == "disaggregated" and not rollout.urls:
        why = "rollout.mode = disaggregated talks to servers that run elsewhere"
        yield ConfigIssue("rollout.urls", [], why, "name them: [http://host:30000, ...]")
    for url in rollout.urls:
        if problem := url_problem(url):
            yield ConfigIssue("rollout.urls", url, problem, "write http://host:port")


@rule("rollout.tensor_model_parallel_size", "rollout.mode", "model")
def engine_parallelism_fits(case: RuleContext) -> Iterator[ConfigIssue]:
    """A colocated engine's TP divides the ranks, and any engine's TP the attention heads."""
    rollout, shape = case.recipe.rollout, case.shapes.get("actor")
    tp = rollout.tensor_model_parallel_size
    key = "rollout.tensor_model_parallel_size"
    if rollout.name != "sglang":
        return
    if rollout.mode == "colocated" and case.world_size % tp:
        why = f"does not divide the {case.world_size} ranks"
        yield ConfigIssue(key, tp, why, f"choose one of {divisors(case.world_size)}")
    if shape and shape.heads % tp:
        why = f"does not divide the {shape.heads} attention heads"
        yield ConfigIssue(key, tp, why, f"choose one of {divisors(shape.heads)}")
    elif shape and shape.kv_heads % tp and tp % shape.kv_heads:
        why = f"neither divides the {shape.kv_heads} key-value heads nor is a multiple of them"
        yield ConfigIssue(key, tp, why, f"choose one of {divisors(shape.kv_heads)}")


@rule("rollout.tensor_model_parallel_size", "rollout.expert_parallel_size", "model")
def engine_cuts_feed_forward_evenly(case: RuleContext) -> Iterator[ConfigIssue]:
    """SGLang refuses a feed-forward width that its ranks cannot divide evenly."""
    rollout, shape = case.recipe.rollout, case.shapes.get("actor")
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    given = sglang_options(case.recipe.rollout.server_args)
    if rollout.name != "sglang" or shape is None or shape.heads % tp or tp % ep:
        return
    if given.get("enable_dp_attention") or given.get("moe_dense_tp_size"):
        return  # the feed-forward then has another tensor parallelism
    dense = () if all(shape.sparse_layers) and shape.sparse_layers else (shape.ffn,)
    widths = [("feed-forward width", width, tp) for width in (*dense, shape.shared_ffn)]
    widths.append(("width of an expert", shape.expert_ffn, tp // ep))
    for name, width, ranks in widths:
        if width % ranks:
            yield ConfigIssue(
                "rollout.tensor_model_parallel_size",
                tp,
                f"cuts the {name}, {width}, into {ranks} unequal parts",
                f"choose a value that gives a divisor of {width}",
            )
            return


@rule("rollout.expert_parallel_size", "rollout.tensor_model_parallel_size", "model")
def engine_experts_are_shared_out(case: RuleContext) -> Iterator[ConfigIssue]:
    """An engine's ranks form as many groups as share its experts, all equally large."""
    rollout, shape = case.recipe.rollout, case.shapes.get("actor")
    key, ep, tp = (
        "rollout.expert_parallel_size",
        rollout.expert_parallel_size,
        rollout.tensor_model_parallel_size,
    )
    if rollout.name != "sglang" or ep == 1:
        return
    if tp % ep:
        why = f"does not divide the {tp} ranks of a server (rollout.tensor_model_parallel_size)"
        yield ConfigIssue(key, ep, why, f"choose one of {divisors(tp)}")
    if shape and not shape.num_experts:
        yield ConfigIssue(key, ep, "has no effect: the model has no experts", "leave it out")
    elif shape and shape.num_experts % ep:
        why = f"does not divide the {shape.num_experts} experts"
        yield ConfigIssue(key, ep, why, f"choose one of {divisors(shape.num_experts)}")


_DECIDED = {
    **dict.fromkeys(("model", "model_path"), "set model.path"),
    **dict.fromkeys(("host", "port", "api_key", "base_gpu_id"), "leave it out"),
    **dict.fromkeys(
        ("tp", "tp_size", "tensor_parallel_size"), "set rollout.tensor_model_parallel_size"
    ),
    "custom_weight_loader": "leave it out: weights arrive through mppo's own loader",
    "json_model_override_args": "change config.json in model.path, which the actor reads, too",
    **dict.fromkeys(("ep", "ep_size", "expert_parallel_size"), "set rollout.expert_parallel_size"),
}
"""SGLang options that follow from the rest of the recipe, to the fix."""


def sglang_options(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """``rollout.server_args`` under the field names of SGLang's options."""
    return {name.lstrip("-").replace("-", "_"): value for name, value in server_args.items()}


@rule("rollout.server_args")
def server_options_say_nothing_twice(case: RuleContext) -> Iterator[ConfigIssue]:
    """What a server is, where it listens and how it is cut follows from other keys."""
    for name, value in sglang_options(case.recipe.rollout.server_args).items():
        if name in _DECIDED:
            yield ConfigIssue(
                f"rollout.server_args.{name}", value, "is decided by mppo", _DECIDED[name]
            )


@rule("rollout.name", "model")
def server_knows_the_layers(case: RuleContext) -> Iterator[ConfigIssue]:
    """SGLang 0.5 builds every layer of a Qwen mixture of experts with experts."""
    shape = case.shapes.get("actor")
    if case.recipe.rollout.name != "sglang" or shape is None:
        return
    dense = shape.num_layers - sum(shape.sparse_layers)
    if shape.model_type in ("qwen2_moe", "qwen3_moe") and dense:
        yield ConfigIssue(
            "rollout.name",
            "sglang",
            f"SGLang gives every layer of a {shape.model_type} experts, while config.json "
            f"(mlp_only_layers, decoder_sparse_step) makes {dense} of {shape.num_layers} dense",
            "set rollout.name to local, or use a model without dense layers",
        )


@rule("rollout.partial_rollout", "rollout.over_sampling")
def a_part_is_left_by_an_abort(case: RuleContext) -> Iterator[ConfigIssue]:
    """Nothing is broken off unless more prompts are asked than needed."""
    rollout = case.recipe.rollout
    if rollout.partial_rollout and not rollout.over_sampling:
        why = "has no effect with rollout.over_sampling = 0: no response is broken off"
        yield ConfigIssue("rollout.partial_rollout", True, why, "set over_sampling, such as 0.25")


@rule("rollout.verify_sync", "rollout.logprob_tolerance")
def tolerance_needs_its_check(case: RuleContext) -> Iterator[ConfigIssue]:
    """A tolerance is compared only by the log-probability check."""
    rollout = case.recipe.rollout
    if rollout.logprob_tolerance is not None and rollout.verify_sync != "logprob":
        yield ConfigIssue(
            "rollout.logprob_tolerance",
            rollout.logprob_tolerance,
            f"has no effect with rollout.verify_sync = {rollout.verify_sync}",
            "set verify_sync to logprob, or leave it out",
        )


@rule("rollout.verify_sync", "rollout.sync", "rollout.urls", "rollout.name")
def checksums_need_own_servers(case: RuleContext) -> Iterator[ConfigIssue]:
    """Checksums are verified by the weight loader of servers that the run starts."""
    rollout = case.recipe.rollout
    if rollout.name != "sglang" or rollout.verify_sync != "checksum":
        return
    fix = "set verify_sync to logprob, which works with every sync and every server"
    why = None
    if rollout.urls:
        why = "needs servers that the run starts itself; rollout.urls names others"
    elif rollout.sync != "tensor":
        why = f"needs rollout.sync = tensor, not {rollout.sync}"
    if why is not None:
        yield ConfigIssue("rollout.verify_sync", "checksum", why, fix)


@rule("actor.router_replay", "rollout.server_args", "rollout.name")
def replayed_experts_are_returned(case: RuleContext) -> Iterator[ConfigIssue]:
    """R3 trains through the experts that servers return."""
    if case.recipe.actor.router_replay != "R3" or case.recipe.rollout.name != "sglang":
        return
    name = "enable_return_routed_experts"
    if sglang_options(case.recipe.rollout.server_args).get(name, True) is not True:
        why = "cannot go with actor.router_replay = R3: servers would not return the experts"
        fix = "leave it out, or set router_replay to R2"
        yield ConfigIssue(f"rollout.server_args.{name}", False, why, fix)


@rule("trainer.rollout_ahead", "rollout.name", "rollout.urls", "rollout.mode")
def only_servers_apart_generate_ahead(case: RuleContext) -> Iterator[ConfigIssue]:
    """Generation overlaps training where the two share neither threads nor memory."""
    rollout, ahead = case.recipe.rollout, case.recipe.trainer.rollout_ahead
    why = None
    if rollout.name == "local":
        why = "the local engine generates in the ranks that train: samples would only be older"
    elif not rollout.urls and rollout.mode == "colocated":
        why = "colocated servers sleep while their devices train"
    if ahead and why is not None:
        fix = "name servers that run apart in rollout.urls (rollout.name: sglang), or set 0"
        yield ConfigIssue("trainer.rollout_ahead", ahead, why, fix)


@rule("trainer.rollout_ahead", "algorithm.rollout_correction")
def older_samples_are_corrected(case: RuleContext) -> Iterator[ConfigIssue]:
    """What weights before the last update sampled is weighed against them."""
    ahead, correction = case.recipe.trainer.rollout_ahead, case.recipe.algorithm.rollout_correction
    if ahead and correction.rollout_is == "off" and not correction.bypass_mode:
        yield ConfigIssue(
            "algorithm.rollout_correction.rollout_is",
            "off",
            f"trainer.rollout_ahead = {ahead} trains on samples of the weights before the last "
            "update",
            "set it to token (weights truncated at rollout_is_threshold), or bypass_mode to true",
        )


_OTHER_SHARDS = (
    "pp_size",
    "pipeline_parallel_size",
    "enable_dp_attention",
    "quantization",
)
"""SGLang options that lay parameters out otherwise than tensor and expert parallelism do."""


@rule("rollout.sync_mode", "rollout.sync", "rollout.urls", "rollout.name", "rollout.server_args")
def pieces_reach_their_rank(case: RuleContext) -> Iterator[ConfigIssue]:
    """Pieces of parameters go through SGLang's custom weight loader, by shared memory."""
    rollout = case.recipe.rollout
    key, mode = "rollout.sync_mode", rollout.sync_mode
    if mode == "full":
        return
    if rollout.name != "sglang":
        why = f"has no effect with rollout.name = {rollout.name}: its weights are copied in place"
        yield ConfigIssue(key, mode, why, "leave it out, or set rollout.name to sglang")
        return
    if rollout.sync != "tensor":
        why = (
            f"cannot go with rollout.sync = {rollout.sync}: SGLang 0.5 hands only what "
            "update_weights_from_tensor brings to a loader that takes pieces"
        )
        yield ConfigIssue(key, mode, why, "set rollout.sync to tensor, or sync_mode to full")
    if rollout.urls:
        why = "is for servers the run starts itself, beside its ranks; rollout.urls names others"
        yield ConfigIssue(key, mode, why, "set sync_mode to full, or leave rollout.urls out")
    given = sglang_options(case.recipe.rollout.server_args)
    for name in _OTHER_SHARDS:
        if given.get(name) not in (None, 1, False):
            why = f"cannot go with rollout.server_args.{name}: parameters are then cut otherwise"
            yield ConfigIssue(key, mode, why, "set sync_mode to full, or leave that option out")
