"""Rules between estimator, losses, KL and corrections: combinations that make no sense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mppo.config.errors import ConfigIssue
from mppo.config.rules.rule import RuleContext, rule
from mppo.config.sections.algorithm import FilterGroupsConfig
from mppo.config.sections.roles import SEQUENCE_LOSSES


@rule("algorithm.rollout_correction")
def bypass_corrects_already(case: RuleContext) -> Iterator[ConfigIssue]:
    """With the engine's log-probabilities as the old ones, the ratio is the importance weight."""
    correction = case.recipe.algorithm.rollout_correction
    if correction.bypass_mode and correction.rollout_is != "off":
        yield ConfigIssue(
            "algorithm.rollout_correction.rollout_is",
            correction.rollout_is,
            "bypass_mode takes the policy's ratio against the engine, which already corrects",
            "set rollout_is to off, or bypass_mode to false",
        )


@rule("algorithm.rollout_correction")
def veto_is_a_small_ratio(case: RuleContext) -> Iterator[ConfigIssue]:
    """A veto above 1 would drop sequences on which actor and engine agree."""
    threshold = case.recipe.algorithm.rollout_correction.rollout_token_veto_threshold
    if threshold is not None and threshold >= 1:
        key = "algorithm.rollout_correction.rollout_token_veto_threshold"
        why = "is no small ratio: tokens on which actor and engine agree have 1"
        yield ConfigIssue(key, threshold, why, "1e-4 is usual")


@rule("actor.policy_loss", "actor.loss_agg_mode")
def sequence_losses_average_over_sequences(case: RuleContext) -> Iterator[ConfigIssue]:
    """GSPO, GMPO and SAPO always take seq-mean-token-mean; the default may stand."""
    actor = case.recipe.actor
    mode = actor.policy_loss.loss_mode
    if mode in SEQUENCE_LOSSES and actor.loss_agg_mode not in ("seq-mean-token-mean", "token-mean"):
        why = f"actor.policy_loss.loss_mode = {mode} is defined with seq-mean-token-mean"
        yield ConfigIssue("actor.loss_agg_mode", actor.loss_agg_mode, why, "leave it out")


@rule("algorithm.adv_estimator", "algorithm.f_norm", "algorithm.norm_adv_by_std_in_grpo")
def estimator_keys_need_their_estimator(case: RuleContext) -> Iterator[ConfigIssue]:
    """A key that one estimator reads is refused where another is chosen."""
    algorithm = case.recipe.algorithm
    chosen = f"has no effect with algorithm.adv_estimator = {algorithm.adv_estimator}"
    if algorithm.f_norm != 1.0 and algorithm.adv_estimator != "gpg":
        yield ConfigIssue(
            "algorithm.f_norm", algorithm.f_norm, chosen, "leave it out, or choose gpg"
        )
    if not algorithm.norm_adv_by_std_in_grpo and algorithm.adv_estimator != "grpo":
        key = "algorithm.norm_adv_by_std_in_grpo"
        yield ConfigIssue(key, False, chosen, "leave it out, or choose grpo")


_CORRECTION = "algorithm.rollout_correction"
_OPTIONS: tuple[tuple[str, tuple[str, ...], str, tuple[object, ...]], ...] = (
    ("actor.policy_loss", ("tau_pos", "tau_neg"), "actor.policy_loss.loss_mode", ("sapo",)),
    (
        "actor.policy_loss",
        ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
        "actor.policy_loss.loss_mode",
        ("clip_cov",),
    ),
    (
        "actor.policy_loss",
        ("kl_cov_ratio", "ppo_kl_coef"),
        "actor.policy_loss.loss_mode",
        ("kl_cov",),
    ),
    ("algorithm.pf_ppo", ("reweight_method", "weight_pow"), "algorithm.use_pf_ppo", (True,)),
    (
        _CORRECTION,
        ("rollout_is_threshold", "rollout_is_mode", "rollout_is_batch_normalize"),
        f"{_CORRECTION}.rollout_is",
        ("token", "sequence"),
    ),
    ("reward", ("overlong_penalty_factor",), "reward.overlong_buffer_len", ()),
)
"""Section, keys of it, the key that chooses whether they are read, and its values under which they
are; none named: any but 0."""


@rule("actor.policy_loss", "algorithm.pf_ppo", "algorithm.use_pf_ppo", _CORRECTION, "reward")
def options_need_their_method(case: RuleContext) -> Iterator[ConfigIssue]:
    """What only one loss, draw, correction or penalty reads is refused where it is not chosen."""
    for prefix, names, chooser, readers in _OPTIONS:
        section, chosen = _at(case.recipe, prefix), _at(case.recipe, chooser)
        if chosen in readers if readers else chosen:
            continue
        for name in names:
            value = getattr(section, name)
            if value != type(section).model_fields[name].default:
                right = " or ".join(str(reader).lower() for reader in readers) or "above 0"
                value_now = "null" if chosen is None else str(chosen).lower()
                why = f"has no effect with {chooser} = {value_now}"
                fix = f"set {chooser} to {right}, or leave it out"
                yield ConfigIssue(f"{prefix}.{name}", value, why, fix)


def _at(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


@rule("algorithm.normalize_scores", "rollout.n")
def normalization_is_complete(case: RuleContext) -> Iterator[ConfigIssue]:
    """Each way to normalise scores has what it reads, and nothing that it would ignore."""
    config, samples = case.recipe.algorithm.normalize_scores, case.recipe.rollout.n
    if config.mode == "group" and samples < 2:
        why = "algorithm.normalize_scores.mode = group compares the samples of one prompt"
        yield ConfigIssue("rollout.n", samples, why, "choose 2 or more (8 is usual)")
    if config.mode != "given":
        for name, default in (("mean", 0.0), ("std", 1.0)):
            value = getattr(config, name)
            if value != default:
                why = f"has no effect with algorithm.normalize_scores.mode = {config.mode}"
                key = f"algorithm.normalize_scores.{name}"
                yield ConfigIssue(key, value, why, "set the mode to given, or leave it out")


@rule(
    "algorithm.adv_estimator", "algorithm.whiten_advantages", "algorithm.whiten_over", "rollout.n"
)
def whitening_over_groups_has_groups(case: RuleContext) -> Iterator[ConfigIssue]:
    """Whitening over a prompt's responses needs several of them, and whitening."""
    algorithm, samples = case.recipe.algorithm, case.recipe.rollout.n
    if algorithm.whiten_over != "group":
        return
    if not algorithm.whitens:
        why = "has no effect: advantages are not whitened"
        fix = "set algorithm.whiten_advantages to true, or leave it out"
        yield ConfigIssue("algorithm.whiten_over", "group", why, fix)
    elif samples < 2:
        why = "algorithm.whiten_over = group compares the samples of one prompt"
        yield ConfigIssue("rollout.n", samples, why, "choose 2 or more (8 is usual)")


@rule("actor.ptx_coef", "actor.router_replay", "data.ptx_files", "data.ptx_batch_size")
def unsupervised_loss_is_complete(case: RuleContext) -> Iterator[ConfigIssue]:
    """The language-model loss needs text and a weight; text has no experts to replay."""
    data, actor = case.recipe.data, case.recipe.actor
    if actor.ptx_coef and not data.ptx_files:
        why, fix = f"actor.ptx_coef = {actor.ptx_coef} needs text", "name files, or leave it out"
        yield ConfigIssue("data.ptx_files", [], why, fix)
    if actor.ptx_coef and actor.router_replay != "off":
        why = f"text of actor.ptx_coef = {actor.ptx_coef} has no experts to replay"
        yield ConfigIssue("actor.router_replay", actor.router_replay, why, "set one of them off")
    for name in ("ptx_files", "ptx_batch_size"):
        value = getattr(data, name)
        if value and not actor.ptx_coef:
            value = list(value) if name == "ptx_files" else value
            why = "has no effect with actor.ptx_coef = 0"
            yield ConfigIssue(f"data.{name}", value, why, "set actor.ptx_coef, or leave it out")


@rule("algorithm.filter_groups", "algorithm.adv_estimator", "rollout.n")
def dynamic_sampling_compares_samples(case: RuleContext) -> Iterator[ConfigIssue]:
    """A group differs in score only where it has several sampled responses."""
    algorithm, samples = case.recipe.algorithm, case.recipe.rollout.n
    config, default = algorithm.filter_groups, FilterGroupsConfig()
    if config.enable and samples < 2:
        why = "algorithm.filter_groups compares the samples of one prompt"
        yield ConfigIssue("rollout.n", samples, why, "choose 2 or more (8 is usual)")
    if config.enable and algorithm.adv_estimator == "remax":
        why = "remax compares with a greedy response: groups of equal scores teach it too"
        fix = "set it to false, or choose another estimator"
        yield ConfigIssue("algorithm.filter_groups.enable", True, why, fix)
    if not config.enable and config.max_num_gen_batches != default.max_num_gen_batches:
        key = "algorithm.filter_groups.max_num_gen_batches"
        why, fix = "has no effect with filter_groups.enable = false", "leave it out, or enable it"
        yield ConfigIssue(key, config.max_num_gen_batches, why, fix)
