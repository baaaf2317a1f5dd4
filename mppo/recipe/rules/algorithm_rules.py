"""Rules on estimator, losses, score normalisation and rollout correction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mppo.recipe.errors import ConfigIssue
from mppo.recipe.rules.rule import RuleContext, rule
from mppo.recipe.sections.algorithm import TOKEN_BASELINES, FilterGroupsConfig
from mppo.recipe.sections.roles import SEQUENCE_LOSSES


@rule("algorithm.rollout_correction", "actor.policy_loss")
def bypass_corrects_already(context: RuleContext) -> Iterator[ConfigIssue]:
    """In bypass mode the policy's ratio is taken against the engine and is the correction."""
    correction = context.recipe.algorithm.rollout_correction
    weighs = context.recipe.actor.policy_loss.loss_mode == "reinforce"
    if correction.bypass_mode and correction.rollout_is != "off" and not weighs:
        yield ConfigIssue(
            "algorithm.rollout_correction.rollout_is",
            correction.rollout_is,
            "with bypass_mode the policy's ratio against the engine is already the correction",
            "set rollout_is to off, or bypass_mode to false; or actor.policy_loss.loss_mode to "
            "reinforce, which has no ratio of its own",
        )
    if correction.bypass_mode and correction.rollout_is_batch_normalize:
        key = "algorithm.rollout_correction.rollout_is_batch_normalize"
        why = "with bypass_mode the loss weighs by the current policy, a micro-batch at a time"
        yield ConfigIssue(key, True, why, "set it to false, or bypass_mode to false")


@rule("actor.policy_loss", "algorithm.rollout_correction")
def some_losses_compare_with_the_engine(context: RuleContext) -> Iterator[ConfigIssue]:
    """The ratio of ``dis`` and ``reinforce`` is that of the current policy to the engine's."""
    loss_mode = context.recipe.actor.policy_loss.loss_mode
    bypasses = context.recipe.algorithm.rollout_correction.bypass_mode
    if loss_mode in ("dis", "reinforce") and not bypasses:
        key = "algorithm.rollout_correction.bypass_mode"
        why = f"actor.policy_loss.loss_mode = {loss_mode} takes the ratio to the engine's "
        why += "probabilities"
        yield ConfigIssue(key, False, why, "set it to true, or choose another loss")


@rule("actor.policy_loss")
def dro_needs_its_weight(context: RuleContext) -> Iterator[ConfigIssue]:
    """The squared log-ratio of ``dro`` has a weight, which no default suits (verl has none)."""
    options = context.recipe.actor.policy_loss
    if options.loss_mode == "dro" and options.dro_beta is None:
        why = "actor.policy_loss.loss_mode = dro needs it"
        yield ConfigIssue("actor.policy_loss.dro_beta", None, why, "give a number above 0, as 0.1")


_GROUP_ESTIMATORS = frozenset(
    {
        "grpo", "dr_grpo", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg",
        "grpo_passk", "gdpo", *TOKEN_BASELINES,
    }
)  # fmt: skip
"""Estimators that compare the responses to a prompt."""


@rule(
    "algorithm.adv_estimator", "algorithm.normalize_scores", "algorithm.whiten_advantages",
    "algorithm.whiten_over", "algorithm.filter_groups", "rollout.n",
)  # fmt: skip
def comparisons_have_samples(context: RuleContext) -> Iterator[ConfigIssue]:
    """What compares the responses to a prompt needs several of them."""
    algorithm, samples = context.recipe.algorithm, context.recipe.rollout.n
    estimator = algorithm.adv_estimator
    compares = {
        f"algorithm.adv_estimator = {estimator}": estimator in _GROUP_ESTIMATORS,
        "algorithm.normalize_scores.mode = group": algorithm.normalize_scores.mode == "group",
        "algorithm.whiten_over = group": algorithm.whiten_over == "group" and algorithm.whitens,
        "algorithm.filter_groups": algorithm.filter_groups.enable,
    }
    for what, is_on in compares.items():
        if is_on and samples < 2:
            why = f"{what} compares the samples of one prompt"
            yield ConfigIssue("rollout.n", samples, why, "choose 2 or more (8 is usual)")


@rule("algorithm")
def gdpo_has_parts_of_the_reward(context: RuleContext) -> Iterator[ConfigIssue]:
    """GDPO compares the named parts of the samples' rewards, and reads nothing else of them."""
    algorithm = context.recipe.algorithm
    if algorithm.adv_estimator != "gdpo":
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    chosen = "algorithm.adv_estimator = gdpo"
    if not keys:
        fix = "name numbers that the reward function returns, as [accuracy, format]"
        yield ConfigIssue("algorithm.gdpo_reward_keys", [], f"{chosen} needs it", fix)
    if weights and len(weights) != len(keys):
        why = f"algorithm.gdpo_reward_keys has {len(keys)} names"
        fix = "give one weight for each, or leave it out"
        yield ConfigIssue("algorithm.gdpo_reward_weights", list(weights), why, fix)
    for name in ("use_kl_in_reward", "whiten_rewards"):
        if getattr(algorithm, name):
            why = f"{chosen} reads the parts of the reward function's result alone"
            yield ConfigIssue(f"algorithm.{name}", True, why, "set it to false")
    if algorithm.normalize_scores.mode != "off":
        why = f"{chosen} normalises the parts of the reward itself"
        mode = algorithm.normalize_scores.mode
        yield ConfigIssue("algorithm.normalize_scores.mode", mode, why, "leave it out")


@rule("actor.policy_loss", "actor.clip_ratio", "actor.clip_ratio_low")
def dis_masks_below_one(context: RuleContext) -> Iterator[ConfigIssue]:
    """No ratio lies at or below ``1 - low`` if low is 1 or more: nothing would be masked there."""
    actor = context.recipe.actor
    name = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
    low = getattr(actor, name)
    if actor.policy_loss.loss_mode == "dis" and low >= 1:
        why = "1 - this is not above 0: no ratio is small enough for dis to mask"
        yield ConfigIssue(f"actor.{name}", low, why, "choose a number below 1 (SAO: 0.3)")


@rule("algorithm.rollout_correction")
def veto_is_a_small_ratio(context: RuleContext) -> Iterator[ConfigIssue]:
    """A veto of 1 or more would drop sequences on which actor and engine agree."""
    threshold = context.recipe.algorithm.rollout_correction.rollout_token_veto_threshold
    if threshold is not None and threshold >= 1:
        key = "algorithm.rollout_correction.rollout_token_veto_threshold"
        why = "is not below 1, the ratio of a token on which actor and engine agree"
        yield ConfigIssue(key, threshold, why, "choose a small ratio (1e-4 is usual)")


@rule("actor.policy_loss", "actor.loss_agg_mode")
def sequence_losses_average_over_sequences(context: RuleContext) -> Iterator[ConfigIssue]:
    """GSPO, GMPO and SAPO always use seq-mean-token-mean; the default mode may stay."""
    actor = context.recipe.actor
    mode = actor.policy_loss.loss_mode
    if mode in SEQUENCE_LOSSES and actor.loss_agg_mode not in ("seq-mean-token-mean", "token-mean"):
        why = f"actor.policy_loss.loss_mode = {mode} is defined with seq-mean-token-mean"
        yield ConfigIssue("actor.loss_agg_mode", actor.loss_agg_mode, why, "leave it out")


_BY_STD = ("grpo", "grpo_passk", "gdpo")
"""Estimators that divide by the group's standard deviation."""


@rule("algorithm.adv_estimator", "algorithm.f_norm", "algorithm.norm_adv_by_std_in_grpo")
def estimator_keys_need_their_estimator(context: RuleContext) -> Iterator[ConfigIssue]:
    """Keys that only one estimator reads are refused with another."""
    algorithm = context.recipe.algorithm
    chosen = f"has no effect with algorithm.adv_estimator = {algorithm.adv_estimator}"
    if algorithm.f_norm != 1.0 and algorithm.adv_estimator != "gpg":
        yield ConfigIssue(
            "algorithm.f_norm", algorithm.f_norm, chosen, "leave it out, or choose gpg"
        )
    if not algorithm.norm_adv_by_std_in_grpo and algorithm.adv_estimator not in _BY_STD:
        key = "algorithm.norm_adv_by_std_in_grpo"
        yield ConfigIssue(key, False, chosen, f"leave it out, or choose {' or '.join(_BY_STD)}")


@rule("algorithm.bootstrap_truncated", "algorithm.mask_truncated", "algorithm.whiten_rewards")
def bootstrap_agrees_with_rewards(context: RuleContext) -> Iterator[ConfigIssue]:
    """A bootstrapped response is trained on, and its value is on the scale of the rewards."""
    algorithm = context.recipe.algorithm
    if not algorithm.bootstrap_truncated:
        return
    key = "algorithm.bootstrap_truncated"
    if algorithm.mask_truncated:
        why = "algorithm.mask_truncated leaves out the responses that it is for"
        yield ConfigIssue(key, True, why, "set one of the two to false")
    if algorithm.whiten_rewards:
        why = "algorithm.whiten_rewards would divide the critic's value like a reward"
        yield ConfigIssue(key, True, why, "set one of the two to false")


@rule("algorithm.gae_unit", "algorithm.lam_length_adaptive_alpha", "algorithm.segment_credit")
def lambda_by_length_counts_tokens(context: RuleContext) -> Iterator[ConfigIssue]:
    """A lambda or a credit by the number of tokens does not suit a GAE over turns."""
    algorithm = context.recipe.algorithm
    if algorithm.segment_credit and algorithm.gae_unit == "turn":
        why = "counts the tokens after a segment, but algorithm.gae_unit = turn"
        fix = "set it to false, or gae_unit to token"
        yield ConfigIssue("algorithm.segment_credit", True, why, fix)
    alpha = algorithm.lam_length_adaptive_alpha
    if alpha is not None and algorithm.gae_unit == "turn":
        why = "is a horizon in tokens, but algorithm.gae_unit = turn"
        fix = "leave it out and set algorithm.lam, or set gae_unit to token"
        yield ConfigIssue("algorithm.lam_length_adaptive_alpha", alpha, why, fix)


_CORRECTION = "algorithm.rollout_correction"
_OPTIONS: tuple[tuple[str, tuple[str, ...], str, tuple[object, ...]], ...] = (
    ("actor.policy_loss", ("tau_pos", "tau_neg"), "actor.policy_loss.loss_mode", ("sapo",)),
    (
        "actor.policy_loss",
        ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
        "actor.policy_loss.loss_mode",
        ("clip_cov",),
    ),
    ("actor.policy_loss", ("dro_beta",), "actor.policy_loss.loss_mode", ("dro",)),
    (
        "actor.policy_loss",
        ("kl_cov_ratio", "ppo_kl_coef"),
        "actor.policy_loss.loss_mode",
        ("kl_cov",),
    ),
    ("critic.hl_gauss", ("bins", "min", "max", "sigma_ratio"), "critic.value_loss", ("hl_gauss",)),
    (
        "algorithm",
        ("gdpo_reward_keys", "gdpo_reward_weights"),
        "algorithm.adv_estimator",
        ("gdpo",),
    ),
    ("algorithm.pf_ppo", ("reweight_method", "weight_pow"), "algorithm.use_pf_ppo", (True,)),
    (
        _CORRECTION,
        ("rollout_is_threshold", "rollout_is_mode", "rollout_is_batch_normalize"),
        f"{_CORRECTION}.rollout_is",
        ("token", "sequence"),
    ),
    ("reward", ("overlong_penalty_factor",), "reward.overlong_buffer_len", ()),
    ("reward", ("processes", "batch_size"), "reward.name", ("function",)),
)
"""Section, its keys, the key that turns them on, and the values with which they are on (empty: any
but 0)."""


@rule(
    "actor.policy_loss",
    "algorithm.pf_ppo",
    "algorithm.use_pf_ppo",
    "algorithm.adv_estimator",
    _CORRECTION,
    "reward",
    "critic",
)
def options_need_their_method(context: RuleContext) -> Iterator[ConfigIssue]:
    """Options of a loss, resampling, correction or penalty are refused if it is off."""
    for prefix, names, switch, on_values in _OPTIONS:
        section, current = _at(context.recipe, prefix), _at(context.recipe, switch)
        if current in on_values if on_values else current:
            continue
        for name in names:
            value = getattr(section, name)
            if value != type(section).model_fields[name].default:
                needed = " or ".join(str(on_value).lower() for on_value in on_values) or "above 0"
                shown = "null" if current is None else str(current).lower()
                why = f"has no effect with {switch} = {shown}"
                fix = f"set {switch} to {needed}, or leave it out"
                yield ConfigIssue(f"{prefix}.{name}", value, why, fix)


def _at(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


@rule("algorithm.normalize_scores")
def normalization_is_complete(context: RuleContext) -> Iterator[ConfigIssue]:
    """A mode of score normalisation has no keys that it ignores."""
    config = context.recipe.algorithm.normalize_scores
    if config.mode != "given":
        for name, default in (("mean", 0.0), ("std", 1.0)):
            value = getattr(config, name)
            if value != default:
                why = f"has no effect with algorithm.normalize_scores.mode = {config.mode}"
                key = f"algorithm.normalize_scores.{name}"
                yield ConfigIssue(key, value, why, "set the mode to given, or leave it out")


@rule("algorithm.adv_estimator", "algorithm.whiten_advantages", "algorithm.whiten_over")
def whitening_over_groups_is_on(context: RuleContext) -> Iterator[ConfigIssue]:
    """``whiten_over`` needs whitening."""
    algorithm = context.recipe.algorithm
    if algorithm.whiten_over == "group" and not algorithm.whitens:
        why = "has no effect: advantages are not whitened"
        fix = "set algorithm.whiten_advantages to true, or leave it out"
        yield ConfigIssue("algorithm.whiten_over", "group", why, fix)


@rule("actor.ptx_coef", "actor.router_replay", "data.ptx_files", "data.ptx_batch_size")
def unsupervised_loss_is_complete(context: RuleContext) -> Iterator[ConfigIssue]:
    """The language-model loss needs text and a coefficient, and excludes router replay."""
    data, actor = context.recipe.data, context.recipe.actor
    if actor.ptx_coef and not data.ptx_files:
        why = f"actor.ptx_coef = {actor.ptx_coef} needs text"
        fix = "give files, or leave actor.ptx_coef out"
        yield ConfigIssue("data.ptx_files", [], why, fix)
    if actor.ptx_coef and actor.router_replay != "off":
        why = f"the text of actor.ptx_coef = {actor.ptx_coef} has no experts to replay"
        yield ConfigIssue("actor.router_replay", actor.router_replay, why, "turn one of them off")
    for name in ("ptx_files", "ptx_batch_size"):
        value = getattr(data, name)
        if value and not actor.ptx_coef:
            value = list(value) if name == "ptx_files" else value
            why = "has no effect with actor.ptx_coef = 0"
            yield ConfigIssue(f"data.{name}", value, why, "set actor.ptx_coef, or leave it out")


@rule("algorithm.filter_groups", "algorithm.adv_estimator")
def dynamic_sampling_has_groups(context: RuleContext) -> Iterator[ConfigIssue]:
    """Dynamic sampling needs groups of sampled responses, and its limit dynamic sampling."""
    algorithm = context.recipe.algorithm
    config, default = algorithm.filter_groups, FilterGroupsConfig()
    if config.enable and algorithm.adv_estimator == "remax":
        why = "remax compares with a greedy response and learns from groups of equal scores too"
        fix = "set it to false, or choose another estimator"
        yield ConfigIssue("algorithm.filter_groups.enable", True, why, fix)
    if not config.enable and config.max_num_gen_batches != default.max_num_gen_batches:
        key = "algorithm.filter_groups.max_num_gen_batches"
        why, fix = "has no effect with filter_groups.enable = false", "leave it out, or enable it"
        yield ConfigIssue(key, config.max_num_gen_batches, why, fix)
