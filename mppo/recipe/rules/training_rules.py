"""Rules between batch sizes, algorithm, optimizer and trainer keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.gpu_types import find_gpu
from mppo.recipe.rules.layout_rules import divisors
from mppo.recipe.rules.rule import RuleContext, rule
from mppo.recipe.schedule_kind import lists_obstacle, stream_obstacle
from mppo.recipe.sections.roles import BatchingConfig
from mppo.recipe.sections.rollout import DrawingConfig
from mppo.safety.bounded_http import url_problem


def mini_batches(context: RuleContext) -> Iterator[tuple[str, int]]:
    """Key and size, in prompts, of each trained role's mini-batch."""
    actor = context.recipe.actor.ppo_mini_batch_size
    yield "actor.ppo_mini_batch_size", actor
    if context.recipe.algorithm.uses_critic:
        own = context.recipe.critic.ppo_mini_batch_size
        yield ("critic.ppo_mini_batch_size", own) if own else ("actor.ppo_mini_batch_size", actor)


@rule("data.train_batch_size", "actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
def mini_batch_divides_batch(context: RuleContext) -> Iterator[ConfigIssue]:
    """The batch is a multiple of the mini-batch (both in prompts)."""
    batch = context.recipe.data.train_batch_size
    for key, size in dict(mini_batches(context)).items():
        if batch % size:
            why = f"data.train_batch_size = {batch} is not a multiple of it"
            yield ConfigIssue(key, size, why, f"choose one of {divisors(batch)}")


@rule("actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size", "rollout.n", "*.megatron")
def mini_batch_feeds_every_rank(context: RuleContext) -> Iterator[ConfigIssue]:
    """Every data-parallel rank gets at least one sequence of each mini-batch."""
    sizes = dict(mini_batches(context))
    samples = context.recipe.rollout.n
    for role in context.roles:
        if not role.trained:
            continue
        key = f"{role.name}.ppo_mini_batch_size"
        size = sizes.get(key, context.recipe.actor.ppo_mini_batch_size)
        try:
            dp = role.megatron.layout(context.world_size).dp
        except ValueError:
            continue  # layout_fits_world says so
        if size * samples < dp:
            why = (
                f"{size} prompts x {samples} samples are fewer than the {dp} data-parallel ranks "
                f"of the {role.name}"
            )
            yield ConfigIssue(key, size, why, f"choose at least {-(-dp // samples)}")


@rule("algorithm")
def kl_control_needs_kl_in_reward(context: RuleContext) -> Iterator[ConfigIssue]:
    """An adaptive coefficient steers the KL penalty in the reward."""
    algorithm = context.recipe.algorithm
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        why = "has no effect with algorithm.use_kl_in_reward = false"
        fix = "set use_kl_in_reward to true, or the type to fixed"
        yield ConfigIssue("algorithm.kl_ctrl.type", "adaptive", why, fix)


@rule("ref", "algorithm", "actor.use_kl_loss")
def reference_path_needs_kl(context: RuleContext) -> Iterator[ConfigIssue]:
    """``ref.path`` needs a KL term, the only reader of the reference."""
    if context.recipe.ref.path and not context.recipe.uses_reference:
        why = "no KL term is on, so no reference is used"
        fix = "set algorithm.use_kl_in_reward or actor.use_kl_loss, or leave ref.path out"
        yield ConfigIssue("ref.path", context.recipe.ref.path, why, fix)


@rule("algorithm", "trainer.critic_warmup", "trainer.stage", "critic.path")
def critic_keys_need_a_critic(context: RuleContext) -> Iterator[ConfigIssue]:
    """Keys of the critic need an estimator that trains one."""
    if context.recipe.algorithm.uses_critic:
        return
    why = f"algorithm.adv_estimator = {context.recipe.algorithm.adv_estimator} trains no critic"
    fix = "leave it out, or set adv_estimator to gae"
    if context.recipe.trainer.critic_warmup:
        yield ConfigIssue("trainer.critic_warmup", context.recipe.trainer.critic_warmup, why, fix)
    if context.recipe.pretrains_value:
        fixed = "set algorithm.adv_estimator to gae, or this key to ppo"
        yield ConfigIssue("trainer.stage", context.recipe.trainer.stage, why, fixed)
    if context.recipe.critic.path:
        yield ConfigIssue("critic.path", context.recipe.critic.path, why, fix)
    for name in (
        "lam_value", "lam_length_adaptive_alpha", "score_after_end", "bootstrap_truncated",
        "gae_unit", "segment_credit",
    ):  # fmt: skip
        value = getattr(context.recipe.algorithm, name)
        if value not in (None, False, "token"):
            yield ConfigIssue(f"algorithm.{name}", value, why, fix)


@rule("critic.value_loss", "critic.hl_gauss", "critic.cliprange_value", "algorithm")
def histogram_of_values_is_complete(context: RuleContext) -> Iterator[ConfigIssue]:
    """A critic's histogram has a range, and a loss without a clipped value."""
    critic = context.recipe.critic
    if critic.value_loss != "hl_gauss":
        return
    if not context.recipe.algorithm.uses_critic:
        why = f"algorithm.adv_estimator = {context.recipe.algorithm.adv_estimator} trains no critic"
        yield ConfigIssue("critic.value_loss", "hl_gauss", why, "leave it out")
    if critic.hl_gauss.min >= critic.hl_gauss.max:
        why = f"is not above critic.hl_gauss.min = {critic.hl_gauss.min:g}"
        fix = "give the range of returns, such as 0 and 1 for scores of 0 and 1"
        yield ConfigIssue("critic.hl_gauss.max", critic.hl_gauss.max, why, fix)
    if critic.cliprange_value not in (None, type(critic)().cliprange_value):
        why = "has no meaning for critic.value_loss = hl_gauss, a cross-entropy"
        fix = "set it to null, or value_loss to mse"
        yield ConfigIssue("critic.cliprange_value", critic.cliprange_value, why, fix)


@rule("trainer.stage", "trainer.value_gate")
def value_gate_needs_its_stage(context: RuleContext) -> Iterator[ConfigIssue]:
    """Only value pretraining has a gate."""
    trainer = context.recipe.trainer
    defaults = type(trainer.value_gate)()
    for name in type(defaults).model_fields:
        value = getattr(trainer.value_gate, name)
        if trainer.stage == "ppo" and value != getattr(defaults, name):
            why, fix = "has no effect with trainer.stage = ppo", "set stage to value_pretraining"
            yield ConfigIssue(f"trainer.value_gate.{name}", value, why, f"{fix}, or leave it out")


@rule("actor.loss_agg_mode", "actor.loss_scale_factor")
def scale_factor_needs_its_mode(context: RuleContext) -> Iterator[ConfigIssue]:
    """Only one aggregation mode uses ``loss_scale_factor``."""
    actor = context.recipe.actor
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        why = f"has no effect with actor.loss_agg_mode = {actor.loss_agg_mode}"
        fix = "set loss_agg_mode to seq-mean-token-sum-norm, or leave it out"
        yield ConfigIssue("actor.loss_scale_factor", actor.loss_scale_factor, why, fix)


@rule("actor.policy_loss")
def covariance_bounds_are_ordered(context: RuleContext) -> Iterator[ConfigIssue]:
    """Clip-Cov's band has a lower end below its upper end."""
    loss = context.recipe.actor.policy_loss
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        why = f"is not below clip_cov_ub = {loss.clip_cov_ub}"
        fix = "lower it, or raise clip_cov_ub"
        yield ConfigIssue("actor.policy_loss.clip_cov_lb", loss.clip_cov_lb, why, fix)


@rule("trainer.schedule", "trainer.align_overflow", "algorithm", "actor", "critic")
def schedule_is_possible(context: RuleContext) -> Iterator[ConfigIssue]:
    """A schedule that the recipe names must suit the roles and the rule for skipped steps."""
    trainer = context.recipe.trainer
    if trainer.schedule not in ("fused", "flush_free"):
        return
    obstacle = stream_obstacle(context.recipe)
    if obstacle is not None:
        fix = f"{obstacle.cure}, or set it to auto, which then means sequential"
        yield ConfigIssue("trainer.schedule", trainer.schedule, obstacle.why, fix)
    elif trainer.align_overflow and trainer.schedule == "flush_free":
        why = (
            "trainer.align_overflow = true skips the steps of actor and critic together, but here "
            "one role steps before the other's gradient is known"
        )
        fix = "set it to fused, or align_overflow to false"
        yield ConfigIssue("trainer.schedule", trainer.schedule, why, fix)


@rule("algorithm", "actor", "critic")
def balanced_budgets_have_two_roles(context: RuleContext) -> Iterator[ConfigIssue]:
    """A budget that follows the other role's needs that role's budget and a shared pipeline."""
    recipe = context.recipe
    sections: dict[str, BatchingConfig] = {"actor": recipe.actor}
    if recipe.algorithm.uses_critic:
        sections["critic"] = recipe.critic
    off = [f"{name}.use_dynamic_bsz" for name, s in sections.items() if not s.use_dynamic_bsz]
    obstacle = stream_obstacle(recipe)
    for name, section in sections.items():
        key = f"{name}.ppo_max_token_len_per_gpu"
        if section.ppo_max_token_len_per_gpu != "auto":
            continue
        if obstacle is not None:
            why = f"it balances two roles that share a pipeline, but {obstacle.why}"
            yield ConfigIssue(key, "auto", why, f"give a number of tokens, or {obstacle.cure}")
        elif off:
            why = f"it balances the token budgets of actor and critic, but {off[0]} = false"
            fix = f"set {' and '.join(off)} to true, or leave the key out"
            yield ConfigIssue(key, "auto", why, fix)


@rule("trainer.timeline", "algorithm", "actor", "critic")
def timeline_has_lists(context: RuleContext) -> Iterator[ConfigIssue]:
    """A recorded update is one list of actions for both roles."""
    steps = context.recipe.trainer.timeline.steps
    obstacle = lists_obstacle(context.recipe) if steps else None
    if obstacle is not None:
        fix = f"leave it out, or {obstacle.cure}"
        yield ConfigIssue("trainer.timeline.steps", list(steps), obstacle.why, fix)


@rule("trainer.profile")
def profiled_ranks_exist(context: RuleContext) -> Iterator[ConfigIssue]:
    """A rank that is profiled is a rank of the run."""
    profile = context.recipe.trainer.profile
    beyond = [rank for rank in profile.ranks if rank >= context.world_size]
    if profile.steps and beyond:
        why = f"the run has the ranks 0 to {context.world_size - 1}"
        yield ConfigIssue("trainer.profile.ranks", beyond[0], why, "leave it out")


_CORRECTION = "algorithm.rollout_correction"


@rule(_CORRECTION)
def every_rejection_has_bounds(context: RuleContext) -> Iterator[ConfigIssue]:
    """Bounds are one number, or one for each rejection."""
    correction = context.recipe.algorithm.rollout_correction
    count = len(correction.rollout_rs)
    for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
        given = getattr(correction, name)
        if len(given) > 1 and len(given) != count:
            why = f"has {len(given)} numbers, rollout_rs {count} rejections"
            fix = "give one number, or one for each of them"
            yield ConfigIssue(f"{_CORRECTION}.{name}", list(given), why, fix)


@rule(_CORRECTION)
def correction_bounds_are_ordered(context: RuleContext) -> Iterator[ConfigIssue]:
    """Lower bounds of the rollout correction are below the upper ones, and their method is on."""
    correction = context.recipe.algorithm.rollout_correction
    lowers, uppers = correction.rollout_rs_threshold_lower, correction.rollout_rs_threshold
    pairs = [("is", "lower", correction.rollout_is_lower, correction.rollout_is_threshold)]
    pairs += [
        ("rs", "threshold_lower", lower, uppers[index % len(uppers)])
        for index, lower in enumerate(lowers)
    ]
    on = {"is": correction.rollout_is != "off", "rs": bool(correction.rollout_rs)}
    for method, name, lower, upper in pairs:
        key = f"{_CORRECTION}.rollout_{method}_{name}"
        if lower is not None and not on[method]:
            why = f"has no effect with rollout_{method} = off"
            yield ConfigIssue(key, lower, why, f"leave it out, or choose a rollout_{method}")
        elif lower is not None and lower >= upper:
            upper_key = f"rollout_{method}_threshold"
            fix = f"lower it, or raise {upper_key}"
            yield ConfigIssue(key, lower, f"is not below {upper_key} = {upper}", fix)


@rule("actor.optim", "critic.optim", "trainer.total_training_steps")
def schedules_fit(context: RuleContext) -> Iterator[ConfigIssue]:
    """``min_lr`` is at most ``lr``, warm-up ends within the run, and betas are in [0, 1)."""
    total = context.recipe.trainer.total_training_steps
    for name, optim in (
        ("actor", context.recipe.actor.optim),
        ("critic", context.recipe.critic.optim),
    ):
        if optim.min_lr > optim.lr:
            why = f"is above {name}.optim.lr = {optim.lr}"
            yield ConfigIssue(f"{name}.optim.min_lr", optim.min_lr, why, "lower it")
        warmup = optim.lr_warmup_steps
        if warmup is not None and total is not None and warmup > total:
            why = f"is more than trainer.total_training_steps = {total}"
            yield ConfigIssue(f"{name}.optim.lr_warmup_steps", warmup, why, "lower it")
        for index, beta in enumerate(optim.betas):
            if not 0 <= beta < 1:
                why = "is outside [0, 1)"
                yield ConfigIssue(
                    f"{name}.optim.betas.{index}", beta, why, "0.9 and 0.999 are usual"
                )


@rule("rollout.temperature", "rollout.top_k", "rollout.n", "rollout.val_kwargs")
def sampling_is_possible(context: RuleContext) -> Iterator[ConfigIssue]:
    """Training needs a distribution to sample from; several greedy samples are all the same."""
    rollout = context.recipe.rollout
    if rollout.temperature == 0:
        why = "greedy decoding has no log-probabilities to train on"
        yield ConfigIssue("rollout.temperature", 0.0, why, "choose a value above 0 (1.0 is usual)")
    sections: list[tuple[str, DrawingConfig]] = [("rollout", rollout)]
    sections.append(("rollout.val_kwargs", rollout.val_kwargs))
    for prefix, sampling in sections:
        if sampling.top_k == 0:
            yield ConfigIssue(f"{prefix}.top_k", 0, "keeps no token", "use -1 for all tokens")
    if rollout.val_kwargs.temperature == 0 and rollout.val_kwargs.n > 1:
        why = "greedy samples of one prompt are all the same"
        fix = "set rollout.val_kwargs.temperature above 0, or n to 1"
        yield ConfigIssue("rollout.val_kwargs.n", rollout.val_kwargs.n, why, fix)


@rule("reward", "data.max_response_length")
def reward_source_is_complete(context: RuleContext) -> Iterator[ConfigIssue]:
    """A reward has the key that its kind needs, and none that it ignores."""
    reward = context.recipe.reward
    key_by_name = {"function": "function", "remote": "url"}
    for name, key in key_by_name.items():
        value = getattr(reward, key)
        if reward.name == name and not value:
            yield ConfigIssue(f"reward.{key}", value, f"reward.name = {name} needs it", "set it")
        if reward.name != name and value and not (key == "url" and reward.name == "rule"):
            why = f"has no effect with reward.name = {reward.name}"
            yield ConfigIssue(
                f"reward.{key}", value, why, f"set reward.name to {name}, or leave it out"
            )
    if reward.verifier and reward.name != "rule":
        why = f"has no effect with reward.name = {reward.name}"
        yield ConfigIssue("reward.verifier", reward.verifier, why, "set reward.name to rule")
    if reward.memory_mb and reward.name == "remote":
        why = "has no effect with reward.name = remote"
        yield ConfigIssue("reward.memory_mb", reward.memory_mb, why, "leave it out")
    if reward.name == "function" and reward.function and ":" not in reward.function:
        why = "does not name a function"
        fix = "write package.module:function or path/file.py:function"
        yield ConfigIssue("reward.function", reward.function, why, fix)
    if reward.url and (problem := url_problem(reward.url)):
        fix = "write http://host:port/path; a key goes into reward.kwargs.api_key_env"
        yield ConfigIssue("reward.url", reward.url, problem, fix)
    if reward.overlong_buffer_len > context.recipe.data.max_response_length:
        why = f"is longer than data.max_response_length = {context.recipe.data.max_response_length}"
        yield ConfigIssue("reward.overlong_buffer_len", reward.overlong_buffer_len, why, "lower it")


@rule("reward")
def missing_eos_has_one_consequence(context: RuleContext) -> Iterator[ConfigIssue]:
    """A score that is replaced cannot also be reduced by a penalty."""
    reward = context.recipe.reward
    if reward.missing_eos_score is not None and reward.missing_eos_penalty is not None:
        why = (
            f"reward.missing_eos_score = {reward.missing_eos_score} replaces the score that "
            "the penalty would reduce"
        )
        fix = "keep one of them"
        yield ConfigIssue("reward.missing_eos_penalty", reward.missing_eos_penalty, why, fix)


@rule("data.max_prompt_length", "data.max_response_length", "model", "algorithm")
def sequences_fit_positions(context: RuleContext) -> Iterator[ConfigIssue]:
    """Prompt, response and the slot of ``bootstrap_truncated`` fit the model's positions."""
    limit = context.positions.get("actor")
    data, slot = context.recipe.data, int(context.recipe.algorithm.bootstrap_truncated)
    longest = data.max_prompt_length + data.max_response_length + slot
    if limit is not None and longest > limit:
        parts = "max_prompt_length + max_response_length"
        parts += " + 1 (algorithm.bootstrap_truncated)" if slot else ""
        why = f"{parts} = {longest} is more than the model's {limit} positions"
        fix = f"lower one of them by {longest - limit} tokens"
        yield ConfigIssue("data.max_response_length", data.max_response_length, why, fix)


@rule("trainer")
def resume_path_and_mode_agree(context: RuleContext) -> Iterator[ConfigIssue]:
    """``resume_from_path`` and ``resume_mode: resume_path`` are set together."""
    trainer = context.recipe.trainer
    by_path, path = trainer.resume_mode == "resume_path", trainer.resume_from_path
    key = "trainer.resume_from_path"
    if by_path and not path:
        why = "trainer.resume_mode = resume_path needs it"
        yield ConfigIssue(key, None, why, "give a global_step_N folder")
    if path and not by_path:
        why = f"has no effect with trainer.resume_mode = {trainer.resume_mode}"
        yield ConfigIssue(key, path, why, "set resume_mode to resume_path, or leave it out")


@rule("trainer.best_metric", "trainer.save_freq", "trainer.save_every_minutes")
def best_checkpoint_needs_saves(context: RuleContext) -> Iterator[ConfigIssue]:
    """The best checkpoint is chosen among those saved on a schedule."""
    trainer = context.recipe.trainer
    if trainer.best_metric and trainer.save_freq <= 0 and trainer.save_every_minutes is None:
        why = "no checkpoints are saved on a schedule"
        fix = "set trainer.save_freq or trainer.save_every_minutes, or leave it out"
        yield ConfigIssue("trainer.best_metric", trainer.best_metric, why, fix)


@rule("trainer.best_metric", "trainer.test_freq")
def best_of_validation_needs_validation(context: RuleContext) -> Iterator[ConfigIssue]:
    """A checkpoint has the metrics of validation only if its step was validated."""
    trainer = context.recipe.trainer
    name = (trainer.best_metric or "").removeprefix("-")
    if not name.startswith(("val-core/", "val-aux/", "val/reward", "val/response_length")):
        return
    key, every = "trainer.best_metric", trainer.test_freq
    if every <= 0:
        why = "is a metric of validation, and steps are not validated"
        yield ConfigIssue(key, trainer.best_metric, why, "set trainer.test_freq")
    elif trainer.save_freq > 0 and trainer.save_freq % every:
        why = f"only steps that are multiples of trainer.test_freq = {every} are validated"
        fix = f"set trainer.save_freq (now {trainer.save_freq}) to a multiple of it"
        yield ConfigIssue(key, trainer.best_metric, why, fix)


@rule("trainer.gpu")
def gpu_is_known(context: RuleContext) -> Iterator[ConfigIssue]:
    """``trainer.gpu`` is a known type of GPU, or a number of GiB."""
    gpu = context.recipe.trainer.gpu
    if gpu is None:
        return
    try:
        find_gpu(str(gpu), "trainer.gpu")
    except ConfigError as error:
        yield from error.issues


@rule("critic.freeze", "algorithm.adv_estimator")
def patterns_are_regular_expressions(context: RuleContext) -> Iterator[ConfigIssue]:
    """Every pattern is a regular expression, and there is a critic."""
    patterns = context.recipe.critic.freeze
    if patterns and not context.recipe.algorithm.uses_critic:
        estimator = context.recipe.algorithm.adv_estimator
        why = f"algorithm.adv_estimator = {estimator} trains no critic"
        yield ConfigIssue("critic.freeze", list(patterns), why, "leave it out, or choose gae")
    for index, pattern in enumerate(patterns):
        try:
            re.compile(pattern)
        except re.error as error:
            key, why = f"critic.freeze.{index}", f"is not a regular expression: {error}"
            yield ConfigIssue(key, pattern, why, "such as self_attn, or layers\\.[0-3]\\.mlp")
