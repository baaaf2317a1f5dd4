"""Rules on the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mppo.recipe.errors import ConfigIssue
from mppo.recipe.rules.layout_rules import divisors
from mppo.recipe.rules.rule import RuleContext, rule
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.safety.bounded_http import url_problem


@rule("rollout")
def local_engine_has_no_server_keys(context: RuleContext) -> Iterator[ConfigIssue]:
    """The local engine runs in the ranks and ignores keys of servers."""
    rollout = context.recipe.rollout
    if rollout.name != "local":
        return
    why = "has no effect with rollout.name = local"
    fix = "leave it out, or set rollout.name to sglang"
    ignored = ["tensor_model_parallel_size", "expert_parallel_size", "mode", "urls", "server_args"]
    ignored += ["over_sampling"] if rollout.agent is None else []
    for name in ignored:
        value = getattr(rollout, name)
        if value != getattr(RolloutConfig(), name):
            shown = list(value) if name == "urls" else value
            yield ConfigIssue(f"rollout.{name}", shown, why, fix)


@rule("rollout.urls", "rollout.mode", "rollout.name")
def disaggregated_servers_have_urls(context: RuleContext) -> Iterator[ConfigIssue]:
    """The run connects to disaggregated servers by address; it starts colocated ones itself."""
    rollout = context.recipe.rollout
    if rollout.name != "sglang":
        return
    if rollout.mode == "disaggregated" and not rollout.urls:
        why = "rollout.mode = disaggregated needs the addresses of running servers"
        yield ConfigIssue("rollout.urls", [], why, "give them: [http://host:30000, ...]")
    for url in rollout.urls:
        if problem := url_problem(url):
            yield ConfigIssue("rollout.urls", url, problem, "write http://host:port")


@rule("rollout.tensor_model_parallel_size", "rollout.mode", "model")
def engine_parallelism_fits(context: RuleContext) -> Iterator[ConfigIssue]:
    """TP of a colocated engine divides the ranks; TP of any engine divides the attention heads."""
    rollout, shape = context.recipe.rollout, context.shapes.get("actor")
    tp = rollout.tensor_model_parallel_size
    key = "rollout.tensor_model_parallel_size"
    if rollout.name != "sglang":
        return
    if rollout.mode == "colocated" and context.world_size % tp:
        why = f"does not divide the {context.world_size} ranks"
        yield ConfigIssue(key, tp, why, f"choose one of {divisors(context.world_size)}")
    if shape and shape.heads % tp:
        why = f"does not divide the {shape.heads} attention heads"
        yield ConfigIssue(key, tp, why, f"choose one of {divisors(shape.heads)}")
    elif shape and shape.kv_heads % tp and tp % shape.kv_heads:
        why = f"neither divides the {shape.kv_heads} key-value heads nor is a multiple of them"
        yield ConfigIssue(key, tp, why, f"choose one of {divisors(shape.kv_heads)}")


@rule(
    "rollout.tensor_model_parallel_size", "rollout.mode", "rollout.urls", "trainer.n_gpus_per_node"
)
def servers_fit_on_a_node(context: RuleContext) -> Iterator[ConfigIssue]:
    """A server of the run is on one node, on the GPUs of consecutive ranks."""
    rollout, per_node = context.recipe.rollout, context.ranks_per_node
    tp = rollout.tensor_model_parallel_size
    own = rollout.name == "sglang" and rollout.mode == "colocated" and not rollout.urls
    if not own or per_node is None or context.world_size % tp:
        return
    if per_node < context.world_size and per_node % tp:
        yield ConfigIssue(
            "rollout.tensor_model_parallel_size",
            tp,
            f"a server on the GPUs of {tp} consecutive ranks would be on several nodes, which have "
            f"{per_node} ranks each",
            f"choose one of {divisors(per_node)}, or start a server over several nodes yourself "
            "and name it in rollout.urls",
        )


@rule("rollout.tensor_model_parallel_size", "rollout.expert_parallel_size", "model")
def engine_cuts_feed_forward_evenly(context: RuleContext) -> Iterator[ConfigIssue]:
    """SGLang refuses a feed-forward width that its ranks cannot divide evenly."""
    rollout, shape = context.recipe.rollout, context.shapes.get("actor")
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    given = sglang_options(context.recipe.rollout.server_args)
    if rollout.name != "sglang" or shape is None or shape.heads % tp or tp % ep:
        return
    if given.get("enable_dp_attention") or given.get("moe_dense_tp_size"):
        return  # the feed-forward then has another tensor parallelism
    dense = () if all(shape.sparse_layers) and shape.sparse_layers else (shape.ffn,)
    widths = [("feed-forward width", width, tp) for width in (*dense, shape.shared_ffn)]
    widths.append(("width of an expert", shape.expert_ffn, tp // ep))
    for name, width, ranks in widths:
        if width % ranks:
            why = f"cuts the {name}, {width}, into {ranks} unequal parts"
            fix = f"choose a value that gives a divisor of {width}"
            yield ConfigIssue("rollout.tensor_model_parallel_size", tp, why, fix)
            return


@rule("rollout.expert_parallel_size", "rollout.tensor_model_parallel_size", "model")
def engine_expert_parallelism_fits(context: RuleContext) -> Iterator[ConfigIssue]:
    """EP of an engine divides its ranks and the model's experts."""
    rollout, shape = context.recipe.rollout, context.shapes.get("actor")
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


_SET_BY_MPPO = {
    **dict.fromkeys(("model", "model_path"), "set model.path"),
    **dict.fromkeys(("host", "port", "api_key", "base_gpu_id"), "leave it out"),
    **dict.fromkeys(
        ("tp", "tp_size", "tensor_parallel_size"), "set rollout.tensor_model_parallel_size"
    ),
    "random_seed": "set trainer.seed, from which each start of a server gets a seed of its own",
    "custom_weight_loader": "leave it out: weights arrive through mppo's own loader",
    "json_model_override_args": "edit config.json in model.path, which the actor reads too",
    **dict.fromkeys(("ep", "ep_size", "expert_parallel_size"), "set rollout.expert_parallel_size"),
}
"""SGLang options that mppo sets from other keys, each with the fix."""


_REPLICAS = ("dp_size", "data_parallel_size", "dp")
"""SGLang's names for the number of data-parallel replicas within one server."""


def sglang_options(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """``rollout.server_args`` with the names of SGLang's ``ServerArgs`` fields."""
    return {name.lstrip("-").replace("-", "_"): value for name, value in server_args.items()}


@rule("rollout.server_args")
def server_options_do_not_repeat_keys(context: RuleContext) -> Iterator[ConfigIssue]:
    """A server's model, address and parallelism follow from other keys."""
    for name, value in sglang_options(context.recipe.rollout.server_args).items():
        if name in _SET_BY_MPPO:
            yield ConfigIssue(
                f"rollout.server_args.{name}", value, "is set by mppo", _SET_BY_MPPO[name]
            )


@rule("rollout.server_args", "rollout.urls", "rollout.name")
def servers_have_one_replica(context: RuleContext) -> Iterator[ConfigIssue]:
    """The data-parallel replicas of one SGLang server start with the same random seed."""
    rollout = context.recipe.rollout
    given = sglang_options(rollout.server_args)
    for name in _REPLICAS:
        if rollout.name == "sglang" and not rollout.urls and given.get(name, 1) != 1:
            why = (
                "replicas within one SGLang server draw equal random numbers, so samples of a "
                "prompt repeat"
            )
            fix = "leave it out; rollout.servers sets the number of servers, each with its own seed"
            yield ConfigIssue(f"rollout.server_args.{name}", given[name], why, fix)


_NEEDED_TO_SLEEP = {
    ("enable_memory_saver", False): "the server could release nothing while its devices train",
    ("cuda_graph_backend_prefill", "breakable"): (
        "SGLang does not start with breakable graphs where the memory of graphs can be released"
    ),
}
"""Options with which a server cannot release its memory, each with the reason."""


@rule("rollout.server_args", "rollout.mode")
def colocated_servers_can_sleep(context: RuleContext) -> Iterator[ConfigIssue]:
    """Servers on the training devices release their memory while these train."""
    rollout = context.recipe.rollout
    given = sglang_options(rollout.server_args)
    for (name, value), why in _NEEDED_TO_SLEEP.items():
        if rollout.mode == "colocated" and not rollout.urls and given.get(name) == value:
            fix = "leave it out, or use servers elsewhere (rollout.urls)"
            yield ConfigIssue(f"rollout.server_args.{name}", value, why, fix)


@rule("rollout.name", "model")
def server_builds_the_models_layers(context: RuleContext) -> Iterator[ConfigIssue]:
    """SGLang 0.5 builds every layer of a Qwen mixture of experts with experts."""
    shape = context.shapes.get("actor")
    if context.recipe.rollout.name != "sglang" or shape is None:
        return
    dense = shape.num_layers - sum(shape.sparse_layers)
    if shape.like in ("qwen2_moe", "qwen3_moe") and dense:
        why = (
            f"SGLang builds every layer of a {shape.model_type} with experts, but in config.json "
            f"(mlp_only_layers, decoder_sparse_step) {dense} of {shape.num_layers} are dense"
        )
        fix = "set rollout.name to local, or use a model without dense layers"
        yield ConfigIssue("rollout.name", "sglang", why, fix)


@rule("rollout")
def older_tokens_have_a_source(context: RuleContext) -> Iterator[ConfigIssue]:
    """Tokens get old where a batch interrupts others, or where generation overlaps with training.

    The local engine generates in the training ranks, and colocated servers sleep during training.
    """
    rollout = context.recipe.rollout
    if not rollout.max_staleness or rollout.over_sampling or rollout.generates_ahead:
        return
    where = "the local engine generates in the training ranks"
    if rollout.name == "sglang":
        where = "colocated servers sleep while their devices train"
    why = f"has no effect: {where}, and with rollout.over_sampling = 0 no response is interrupted"
    fix = "set over_sampling, such as 0.25, give the addresses of servers in rollout.urls, or set "
    yield ConfigIssue("rollout.max_staleness", rollout.max_staleness, why, f"{fix}it to 0")


@rule("rollout.verify_sync", "rollout.logprob_tolerance")
def tolerance_needs_its_check(context: RuleContext) -> Iterator[ConfigIssue]:
    """Only the check ``logprob`` uses a tolerance."""
    rollout = context.recipe.rollout
    if rollout.logprob_tolerance is not None and rollout.verify_sync != "logprob":
        why = f"has no effect with rollout.verify_sync = {rollout.verify_sync}"
        fix = "set verify_sync to logprob, or leave it out"
        yield ConfigIssue("rollout.logprob_tolerance", rollout.logprob_tolerance, why, fix)


@rule("rollout.verify_sync", "rollout.sync", "rollout.urls", "rollout.name")
def checksums_need_own_servers(context: RuleContext) -> Iterator[ConfigIssue]:
    """Checksums are verified by the weight loader of servers that the run starts."""
    rollout = context.recipe.rollout
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
def replayed_experts_are_returned(context: RuleContext) -> Iterator[ConfigIssue]:
    """R3 trains through the experts that servers return."""
    if context.recipe.actor.router_replay != "R3" or context.recipe.rollout.name != "sglang":
        return
    name = "enable_return_routed_experts"
    if sglang_options(context.recipe.rollout.server_args).get(name, True) is not True:
        why = "cannot go with actor.router_replay = R3: servers would not return the experts"
        fix = "leave it out, or set router_replay to R2"
        yield ConfigIssue(f"rollout.server_args.{name}", False, why, fix)


@rule("rollout", "algorithm.rollout_correction")
def older_samples_are_corrected(context: RuleContext) -> Iterator[ConfigIssue]:
    """Samples of older weights need importance weights or bypass mode."""
    rollout, correction = context.recipe.rollout, context.recipe.algorithm.rollout_correction
    if not rollout.generates_ahead:
        return
    if correction.rollout_is == "off" and not correction.bypass_mode:
        why = (
            f"rollout.max_staleness = {rollout.max_staleness} trains on samples of earlier weights"
        )
        fix = "set it to token (weights truncated at rollout_is_threshold), or bypass_mode to true"
        yield ConfigIssue("algorithm.rollout_correction.rollout_is", "off", why, fix)


_OTHER_SHARDS = ("pp_size", "pipeline_parallel_size", "enable_dp_attention", "quantization")
"""SGLang options that divide or store parameters differently than tensor and expert parallelism."""


@rule("rollout.sync_mode", "rollout.sync", "rollout.urls", "rollout.name", "rollout.server_args")
def slices_reach_the_servers_loader(context: RuleContext) -> Iterator[ConfigIssue]:
    """Slices of parameters go through shared memory to SGLang's custom weight loader."""
    rollout = context.recipe.rollout
    key, mode = "rollout.sync_mode", rollout.sync_mode
    if mode == "full":
        return
    if rollout.name != "sglang":
        why = f"has no effect with rollout.name = {rollout.name}: its weights are copied in place"
        yield ConfigIssue(key, mode, why, "leave it out, or set rollout.name to sglang")
        return
    if rollout.sync != "tensor":
        why = (
            f"does not work with rollout.sync = {rollout.sync}: SGLang 0.5 calls a custom weight "
            "loader from update_weights_from_tensor only"
        )
        yield ConfigIssue(key, mode, why, "set rollout.sync to tensor, or sync_mode to full")
    if rollout.urls:
        why = "needs servers that the run starts itself, but rollout.urls is set"
        yield ConfigIssue(key, mode, why, "set sync_mode to full, or leave rollout.urls out")
    given = sglang_options(context.recipe.rollout.server_args)
    for name in _OTHER_SHARDS:
        if given.get(name) not in (None, 1, False):
            why = f"does not work with rollout.server_args.{name}, which cuts parameters otherwise"
            yield ConfigIssue(key, mode, why, "set sync_mode to full, or leave that option out")
