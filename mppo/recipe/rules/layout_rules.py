"""Rules between a role's layout, its model, the number of ranks, and what leaves the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from mppo.recipe.errors import ConfigIssue
from mppo.recipe.model_shape import ModelShape
from mppo.recipe.rules.rule import MODEL_KEYS, RuleContext, model_rule, role_rule, rule
from mppo.recipe.sections.megatron import MegatronConfig
from mppo.recipe.sections.role_config import RoleConfig


def divisors(number: int) -> str:
    """Divisors of a number, for a fix."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _layout_issue(role: RoleConfig, name: str, value: object, why: str, fix: str) -> ConfigIssue:
    """An issue of a key of a role's layout; it names the key of the role's own model."""
    if role.path_key != "model.path":
        why = f"{why} ({role.path_key})"
        if not role.key.startswith(role.name):
            fix = f"{fix}, or give {role.name}.megatron a layout of its own"
    return ConfigIssue(f"{role.key}.{name}", value, why, fix)


@rule("trainer.nnodes", "trainer.n_gpus_per_node")
def ranks_match_nodes_and_gpus(context: RuleContext) -> Iterator[ConfigIssue]:
    """Nodes times GPUs per node equal the ranks that were started."""
    nodes, per_node = context.recipe.trainer.nnodes, context.recipe.trainer.n_gpus_per_node
    if nodes and per_node and nodes * per_node != context.world_size:
        fit_nodes, rest = divmod(context.world_size, per_node)
        other = f"set trainer.nnodes={fit_nodes}" if not rest else "leave both keys out"
        why = (
            f"trainer.nnodes x trainer.n_gpus_per_node = {nodes} x {per_node} = "
            f"{nodes * per_node}, but the run has {context.world_size} ranks"
        )
        fix = f"give it {nodes * per_node} ranks, or {other}"
        yield ConfigIssue("trainer.n_gpus_per_node", per_node, why, fix)


@rule("*.megatron")
def layout_fits_world(context: RuleContext) -> Iterator[ConfigIssue]:
    """The world size is a multiple of tp x pp x cp and of etp x ep x pp."""
    for role in context.roles:
        m = role.megatron
        try:
            m.layout(context.world_size)
        except ValueError as error:
            dense = (
                m.tensor_model_parallel_size
                * m.pipeline_model_parallel_size
                * m.context_parallel_size
            )
            expert = (
                m.expert_tensor_size * m.expert_model_parallel_size * m.pipeline_model_parallel_size
            )
            yield ConfigIssue(
                role.key,
                f"TP{m.tensor_model_parallel_size} PP{m.pipeline_model_parallel_size} "
                f"CP{m.context_parallel_size} EP{m.expert_model_parallel_size} "
                f"ETP{m.expert_tensor_size}",
                str(error),
                f"start a multiple of {lcm(dense, expert)} ranks, or lower one of the sizes",
            )


@role_rule("*.megatron.overlap_param_gather", "*.megatron.use_distributed_optimizer")
def gathered_weights_are_divided(role: RoleConfig) -> Iterator[ConfigIssue]:
    """Only the distributed optimizer gathers weights after a step."""
    if role.megatron.overlap_param_gather and not role.megatron.use_distributed_optimizer:
        why = (
            "without use_distributed_optimizer every rank updates all weights: there are none "
            "to gather"
        )
        fix = "remove it, or set use_distributed_optimizer to true"
        yield ConfigIssue(f"{role.key}.overlap_param_gather", True, why, fix)


@model_rule("*.megatron.tensor_model_parallel_size")
def tensor_parallel_divides_heads(role: RoleConfig, shape: ModelShape) -> Iterator[ConfigIssue]:
    """TP divides the attention heads; KV heads divide TP or are divided by it."""
    tp = role.megatron.tensor_model_parallel_size
    key = "tensor_model_parallel_size"
    if shape.heads % tp:
        fix = f"choose one of {divisors(shape.heads)}"
        yield _layout_issue(
            role, key, tp, f"does not divide the {shape.heads} attention heads", fix
        )
    elif shape.kv_heads % tp and tp % shape.kv_heads:
        why = f"neither divides the {shape.kv_heads} key-value heads nor is a multiple of them"
        yield _layout_issue(role, key, tp, why, f"choose one of {divisors(shape.kv_heads)}")


@model_rule("*.megatron.tensor_model_parallel_size")
def tensor_parallel_divides_widths(role: RoleConfig, shape: ModelShape) -> Iterator[ConfigIssue]:
    """TP divides the feed-forward width of dense layers; ETP that of experts."""
    m = role.megatron
    tp, etp = m.tensor_model_parallel_size, m.expert_tensor_size
    dense = not all(shape.sparse_layers) if shape.sparse_layers else True
    if dense and shape.ffn % tp:
        why = f"does not divide the feed-forward width {shape.ffn}"
        yield _layout_issue(role, "tensor_model_parallel_size", tp, why, "lower it")
    if shape.num_experts and shape.expert_ffn % etp:
        why = f"does not divide the expert width {shape.expert_ffn}"
        yield _layout_issue(role, "expert_tensor_parallel_size", etp, why, "lower it")


@model_rule("*.megatron")
def pipeline_divides_layers(role: RoleConfig, shape: ModelShape) -> Iterator[ConfigIssue]:
    """The layers divide evenly among the stages, and those of a stage among its chunks."""
    m = role.megatron
    pp, vpp = m.pipeline_model_parallel_size, m.virtual_pipeline_model_parallel_size or 1
    first, last = m.num_layers_in_first_pipeline_stage, m.num_layers_in_last_pipeline_stage
    if pp == 1 or m.pipeline_layers is not None:
        return
    key = "pipeline_model_parallel_size"
    stated = [n for n in (first, last) if n is not None]
    rest, stages = shape.num_layers - sum(stated), pp - len(stated)
    if rest < 0 or (stages == 0) != (rest == 0):
        why = (
            f"the layers of the first and last stage leave {rest} of {shape.num_layers} layers "
            f"for {stages} other stages"
        )
        fix = "correct num_layers_in_first_pipeline_stage / num_layers_in_last_pipeline_stage"
        yield _layout_issue(role, key, pp, why, fix)
    elif stages and rest % stages:
        why = f"{rest} layers do not divide evenly among {stages} stages"
        fix = (
            f"choose one of {divisors(shape.num_layers)}, or set "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )
        yield _layout_issue(role, key, pp, why, fix)
    else:
        sizes = stated + ([rest // stages] if stages else [])
        uneven = [size for size in sizes if size % vpp]
        if uneven:
            why = f"stages of {', '.join(map(str, sizes))} layers do not divide into {vpp} chunks"
            fix = f"choose one of {divisors(uneven[0])}, or leave it out"
            yield _layout_issue(role, "virtual_pipeline_model_parallel_size", vpp, why, fix)


@role_rule("*.megatron")
def pipeline_options_need_a_pipeline(role: RoleConfig) -> Iterator[ConfigIssue]:
    """Interleaving and uneven stages need PP > 1."""
    m = role.megatron
    if m.pipeline_model_parallel_size > 1:
        return
    for name in (
        "virtual_pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_layers",
    ):
        if getattr(m, name) is not None:
            why = "has no effect with pipeline_model_parallel_size = 1"
            fix = "leave it out, or raise pipeline_model_parallel_size"
            yield ConfigIssue(f"{role.key}.{name}", getattr(m, name), why, fix)


@role_rule("*.megatron")
def exchange_of_keys_needs_context_parallelism(role: RoleConfig) -> Iterator[ConfigIssue]:
    """``cp_comm_type`` needs CP > 1."""
    m = role.megatron
    if m.cp_comm_type is not None and m.context_parallel_size == 1:
        why = "has no effect with context_parallel_size = 1"
        fix = "leave it out, or raise context_parallel_size"
        yield ConfigIssue(f"{role.key}.cp_comm_type", m.cp_comm_type, why, fix)


@rule("*.megatron", *MODEL_KEYS)
def pipeline_layers_match_the_model(context: RuleContext) -> Iterator[ConfigIssue]:
    """``pipeline_layers`` has one number per chunk, adds up to the model's layers, and is the only
    key that divides them."""
    for role in context.roles:
        shape, m = context.shapes.get(role.name), role.megatron
        layers, pp = m.pipeline_layers, m.pipeline_model_parallel_size
        if layers is None or pp == 1:
            continue
        key = f"{role.key}.pipeline_layers"
        chunks = pp * (m.virtual_pipeline_model_parallel_size or 1)
        if len(layers) != chunks:
            why = f"has {len(layers)} numbers, but there are PP x VPP = {chunks} chunks"
            yield ConfigIssue(key, list(layers), why, f"give {chunks} numbers")
        elif shape is not None and sum(layers) != shape.num_layers:
            why = f"adds up to {sum(layers)}, but the model has {shape.num_layers} layers"
            yield _layout_issue(role, "pipeline_layers", list(layers), why, "correct the numbers")
        elif m.num_layers_in_first_pipeline_stage or m.num_layers_in_last_pipeline_stage:
            why = (
                "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage is set too"
            )
            yield ConfigIssue(key, list(layers), why, "set one or the other")


@model_rule("*.megatron")
def expert_parallel_divides_experts(role: RoleConfig, shape: ModelShape) -> Iterator[ConfigIssue]:
    """EP divides the experts; EP and ETP above 1 need a mixture of experts."""
    m = role.megatron
    ep, etp = m.expert_model_parallel_size, m.expert_tensor_parallel_size or 1
    for name, size in (("expert_model_parallel_size", ep), ("expert_tensor_parallel_size", etp)):
        if size > 1 and not shape.num_experts:
            why = f"{shape.model_type} is not a mixture of experts"
            yield _layout_issue(role, name, size, why, "set it to 1")
    if shape.num_experts and shape.num_experts % ep:
        why = f"does not divide the {shape.num_experts} experts"
        fix = f"choose one of {divisors(shape.num_experts)}"
        yield _layout_issue(role, "expert_model_parallel_size", ep, why, fix)


@model_rule("*.megatron")
def moe_and_mla_under_tensor_parallel_need_sequence_parallel(
    role: RoleConfig, shape: ModelShape
) -> Iterator[ConfigIssue]:
    """With TP, MoE and MLA need sequence parallelism: Megatron-Core refuses MoE without it, and
    the gradients of MLA's down projections are incomplete without it."""
    m = role.megatron
    if m.sequence_parallel or m.tensor_model_parallel_size == 1:
        return
    if shape.num_experts or shape.mla is not None:
        what = "a mixture of experts" if shape.num_experts else "MLA"
        why = f"{what} with tensor parallelism needs sequence parallelism"
        yield _layout_issue(role, "sequence_parallel", False, why, "set it to true")


_ROUTER_KEYS = (
    "freeze_moe_router", "moe_router_load_balancing_type", "moe_z_loss_coeff",
    "moe_router_bias_update_rate", "moe_token_dispatcher_type", "moe_router_dtype",
    "moe_expert_capacity_factor",
)  # fmt: skip
"""Keys below ``megatron`` that only a mixture of experts reads."""


@model_rule("*.megatron")
def expert_options_need_experts(role: RoleConfig, shape: ModelShape) -> Iterator[ConfigIssue]:
    """Router settings need a mixture of experts."""
    m = role.megatron
    for name in _ROUTER_KEYS if not shape.num_experts else ():
        value = getattr(m, name)
        if value and value != MegatronConfig.model_fields[name].default:
            why = f"{shape.model_type} is not a mixture of experts"
            yield _layout_issue(role, name, value, why, "leave it out")
    if shape.num_experts and not shape.expert_bias and m.moe_router_bias_update_rate > 0:
        why = f"the router of {shape.model_type} has no expert bias"
        fix = "leave it out"
        yield _layout_issue(
            role, "moe_router_bias_update_rate", m.moe_router_bias_update_rate, why, fix
        )


@role_rule("*.megatron")
def router_options_agree(role: RoleConfig) -> Iterator[ConfigIssue]:
    """Router settings do not contradict each other."""
    m = role.megatron
    if m.freeze_moe_router and m.moe_router_bias_update_rate > 0:
        why = "changes the router's bias, but freeze_moe_router is true"
        fix = "set it to 0, or freeze_moe_router to false"
        yield ConfigIssue(
            f"{role.key}.moe_router_bias_update_rate", m.moe_router_bias_update_rate, why, fix
        )
    if m.moe_aux_loss_coeff > 0 and m.moe_router_load_balancing_type == "none":
        why = "has no effect with moe_router_load_balancing_type = none"
        fix = "set that to aux_loss or seq_aux_loss, or the coefficient to 0"
        yield ConfigIssue(f"{role.key}.moe_aux_loss_coeff", m.moe_aux_loss_coeff, why, fix)


@role_rule("*.megatron")
def dispatcher_suits_the_pipeline(role: RoleConfig) -> Iterator[ConfigIssue]:
    """Sequences of varying length under PP need the all-to-all dispatcher (Megatron-Core)."""
    m = role.megatron
    if m.pipeline_model_parallel_size > 1 and m.moe_token_dispatcher_type != "alltoall":
        why = "packed sequences of varying length under pipeline parallelism need alltoall"
        fix = "set it to alltoall"
        yield ConfigIssue(
            f"{role.key}.moe_token_dispatcher_type", m.moe_token_dispatcher_type, why, fix
        )


@role_rule("*.megatron")
def allgather_meets_equal_token_counts(role: RoleConfig) -> Iterator[ConfigIssue]:
    """ETP x EP divides TP x CP: ranks of one TP x CP group have equal token counts."""
    m = role.megatron
    experts = m.expert_tensor_size * m.expert_model_parallel_size
    alike = m.tensor_model_parallel_size * m.context_parallel_size
    if m.moe_token_dispatcher_type == "allgather" and alike % experts:
        why = (
            f"gathers the same number of tokens from {experts} ranks (ETP x EP), but only the "
            f"{alike} ranks of a TP x CP group have the same number"
        )
        fix = "set it to alltoall"
        yield ConfigIssue(f"{role.key}.moe_token_dispatcher_type", "allgather", why, fix)


@rule("actor.router_replay", "critic.router_replay", "rollout.name", *MODEL_KEYS)
def router_replay_has_routers_and_a_record(context: RuleContext) -> Iterator[ConfigIssue]:
    """Replay needs a mixture of experts; R3 also needs an engine that returns its experts."""
    for role in context.roles:
        replay, shape = role.router_replay, context.shapes.get(role.name)
        key = f"{role.name}.router_replay"
        if replay != "off" and shape is not None and not shape.num_experts:
            yield ConfigIssue(
                key, replay, f"{shape.model_type} is not a mixture of experts", "set it to off"
            )
        elif replay == "R3" and context.recipe.rollout.name == "local":
            why = "the local engine does not return the experts it chose"
            yield ConfigIssue(key, replay, why, "set rollout.name to sglang, or choose R2")


@role_rule("*.megatron.moe_expert_capacity_factor", "actor.router_replay", "critic.router_replay")
def replayed_choices_are_not_dropped(role: RoleConfig) -> Iterator[ConfigIssue]:
    """A capacity would drop replayed choices, according to the current routing weights."""
    replay = role.router_replay
    capacity = role.megatron.moe_expert_capacity_factor
    if replay != "off" and capacity is not None:
        why = f"drops expert choices that {role.name}.router_replay = {replay} must repeat"
        fix = "leave it out, or set router_replay to off"
        yield ConfigIssue(f"{role.key}.moe_expert_capacity_factor", capacity, why, fix)


@rule(
    "actor.optim.cpu_offload_fraction",
    "critic.optim.cpu_offload_fraction",
    "*.megatron.use_distributed_optimizer",
)
def hybrid_optimizer_is_distributed(context: RuleContext) -> Iterator[ConfigIssue]:
    """Megatron's hybrid optimizer keeps its copies of the weights only for a distributed one."""
    sections = {"actor": context.recipe.actor, "critic": context.recipe.critic}
    for role in context.roles:
        section = sections.get(role.name)
        if section is None or role.megatron.use_distributed_optimizer:
            continue
        if fraction := section.optim.cpu_offload_fraction:
            why = (
                f"{role.key}.use_distributed_optimizer = false, but the hybrid optimizer needs the "
                "distributed one"
            )
            fix = "set that to true, or leave this key out"
            yield ConfigIssue(f"{role.name}.optim.cpu_offload_fraction", fraction, why, fix)


@rule("ref.megatron.offload", "reward_model.megatron.offload")
def offload_of_frozen_roles(context: RuleContext) -> Iterator[ConfigIssue]:
    """Of a role that is not trained, only the weights can move."""
    for role in context.roles:
        own = role.megatron.offload
        if role.trained or role.key == "actor.megatron" or isinstance(own, str):
            continue
        for name in ("gradients", "optimizer"):
            if getattr(own, name):
                called = "reference" if role.name == "ref" else "reward model"
                why = f"the {called} is not trained: it has no {name}"
                fix = f"remove it; {role.key}.offload.parameters moves its weights"
                yield ConfigIssue(f"{role.key}.offload.{name}", True, why, fix)
