"""Rules between batch sizes, algorithm, optimizer and trainer keys."""

from __future__ import annotations

from collections.abc import Iterator

from mppo.config.errors import ConfigIssue
from mppo.config.rules.layout import divisors
from mppo.config.rules.rule import RuleContext, rule
from mppo.config.sections.rollout import DrawingConfig
from mppo.safety.bounded_http import url_problem

GROUP_ESTIMATORS = frozenset(
    {"grpo", "dr_grpo", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg"}
)
"""Estimators whose baseline is the mean over the samples of one prompt."""


def mini_batches(case: RuleContext) -> Iterator[tuple[str, int]]:
    """Key and size, in prompts, of each trained role's mini-batch."""
    actor = case.recipe.actor.ppo_mini_batch_size
    yield "actor.ppo_mini_batch_size", actor
    if case.recipe.algorithm.uses_critic:
        own = case.recipe.critic.ppo_mini_batch_size
        yield ("critic.ppo_mini_batch_size", own) if own else ("actor.ppo_mini_batch_size", actor)


@rule("data.train_batch_size", "actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
def mini_batch_divides_batch(case: RuleContext) -> Iterator[ConfigIssue]:
    """A batch is a whole number of mini-batches (both counted in prompts)."""
    batch = case.recipe.data.train_batch_size
    for key, size in dict(mini_batches(case)).items():
        if batch % size:
            why = f"data.train_batch_size = {batch} is not a multiple of it"
            yield ConfigIssue(key, size, why, f"choose one of {divisors(batch)}")


@rule("actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size", "rollout.n", "*.megatron")
def mini_batch_feeds_every_rank(case: RuleContext) -> Iterator[ConfigIssue]:
    """Every data-parallel rank gets at least one sequence of each mini-batch."""
    sizes = dict(mini_batches(case))
    samples = case.recipe.rollout.n
    for role in case.roles:
        if role.name == "ref":
            continue
        key = f"{role.name}.ppo_mini_batch_size"
        size = sizes.get(key, case.recipe.actor.ppo_mini_batch_size)
        try:
            dp = role.megatron.layout(case.world_size).dp
        except ValueError:
            continue  # layout_fits_world says so
        if size * samples < dp:
            yield ConfigIssue(
                key,
                size,
                f"{size} prompts x {samples} samples are fewer than the {dp} data-parallel ranks "
                f"of the {role.name}",
                f"choose at least {-(-dp // samples)}",
            )


@rule("algorithm.adv_estimator", "rollout.n")
def group_estimators_need_groups(case: RuleContext) -> Iterator[ConfigIssue]:
    """An estimator that compares samples of one prompt needs at least two of them."""
    estimator, samples = case.recipe.algorithm.adv_estimator, case.recipe.rollout.n
    if estimator in GROUP_ESTIMATORS and samples < 2:
        why = f"algorithm.adv_estimator = {estimator} compares the samples of one prompt"
        yield ConfigIssue("rollout.n", samples, why, "choose 2 or more (8 is usual)")


@rule("algorithm")
def kl_control_needs_kl_in_reward(case: RuleContext) -> Iterator[ConfigIssue]:
    """An adaptive coefficient steers the KL penalty in the reward."""
    algorithm = case.recipe.algorithm
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        why = "has no effect with algorithm.use_kl_in_reward = false"
        fix = "set use_kl_in_reward to true, or the type to fixed"
        yield ConfigIssue("algorithm.kl_ctrl.type", "adaptive", why, fix)


@rule("ref", "algorithm", "actor.use_kl_loss")
def reference_path_needs_kl(case: RuleContext) -> Iterator[ConfigIssue]:
    """A reference of its own is loaded only where a KL term looks at it."""
    if case.recipe.ref.path and not case.recipe.uses_reference:
        yield ConfigIssue(
            "ref.path",
            case.recipe.ref.path,
            "no KL term is on, so no reference is used",
            "set algorithm.use_kl_in_reward or actor.use_kl_loss, or leave ref.path out",
        )


@rule("algorithm", "trainer.critic_warmup", "critic.path")
def critic_keys_need_a_critic(case: RuleContext) -> Iterator[ConfigIssue]:
    """Keys that only a value model obeys are refused where none is trained."""
    if case.recipe.algorithm.uses_critic:
        return
    why = f"algorithm.adv_estimator = {case.recipe.algorithm.adv_estimator} trains no critic"
    fix = "leave it out, or set adv_estimator to gae"
    if case.recipe.trainer.critic_warmup:
        yield ConfigIssue("trainer.critic_warmup", case.recipe.trainer.critic_warmup, why, fix)
    if case.recipe.critic.path:
        yield ConfigIssue("critic.path", case.recipe.critic.path, why, fix)
    for name in ("lam_value", "lam_length_adaptive_alpha", "score_after_end"):
        value = getattr(case.recipe.algorithm, name)
        if value not in (None, False):
            yield ConfigIssue(f"algorithm.{name}", value, why, fix)


@rule("actor.loss_agg_mode", "actor.loss_scale_factor")
def scale_factor_needs_its_mode(case: RuleContext) -> Iterator[ConfigIssue]:
    """``loss_scale_factor`` divides in one aggregation mode only."""
    actor = case.recipe.actor
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        why = f"has no effect with actor.loss_agg_mode = {actor.loss_agg_mode}"
        fix = "set loss_agg_mode to seq-mean-token-sum-norm, or leave it out"
        yield ConfigIssue("actor.loss_scale_factor", actor.loss_scale_factor, why, fix)


@rule("actor.policy_loss")
def covariance_bounds_are_ordered(case: RuleContext) -> Iterator[ConfigIssue]:
    """Clip-Cov's band has a lower end below its upper end."""
    loss = case.recipe.actor.policy_loss
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield ConfigIssue(
            "actor.policy_loss.clip_cov_lb",
            loss.clip_cov_lb,
            f"is not below clip_cov_ub = {loss.clip_cov_ub}",
            "lower it, or raise clip_cov_ub",
        )


@rule("algorithm.rollout_correction")
def correction_bounds_are_ordered(case: RuleContext) -> Iterator[ConfigIssue]:
    """Lower thresholds of the rollout correction lie below the upper ones, and are used."""
    c = case.recipe.algorithm.rollout_correction
    for method, lower_key, upper_key in (
        ("rollout_is", "rollout_is_lower", "rollout_is_threshold"),
        ("rollout_rs", "rollout_rs_threshold_lower", "rollout_rs_threshold"),
    ):
        lower, upper = getattr(c, lower_key), getattr(c, upper_key)
        key = f"algorithm.rollout_correction.{lower_key}"
        if lower is not None and getattr(c, method) == "off":
            why = f"has no effect with {method} = off"
            yield ConfigIssue(key, lower, why, f"leave it out, or choose a {method}")
        elif lower is not None and lower >= upper:
            fix = f"lower it, or raise {upper_key}"
            yield ConfigIssue(key, lower, f"is not below {upper_key} = {upper}", fix)


@rule("actor.optim", "critic.optim", "trainer.total_training_steps")
def schedules_fit(case: RuleContext) -> Iterator[ConfigIssue]:
    """The learning rate never decays upward, and warm-up ends before training does."""
    total = case.recipe.trainer.total_training_steps
    for name, optim in (("actor", case.recipe.actor.optim), ("critic", case.recipe.critic.optim)):
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
def sampling_is_possible(case: RuleContext) -> Iterator[ConfigIssue]:
    """Training needs a distribution to sample from; several greedy samples are all the same."""
    rollout = case.recipe.rollout
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
def reward_source_is_complete(case: RuleContext) -> Iterator[ConfigIssue]:
    """Each kind of reward has what it needs, and nothing that it would ignore."""
    reward = case.recipe.reward
    needs = {"function": "function", "remote": "url"}
    for name, key in needs.items():
        value = getattr(reward, key)
        if reward.name == name and not value:
            yield ConfigIssue(f"reward.{key}", value, f"reward.name = {name} needs it", "set it")
        if reward.name != name and value:
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
        why = "names no function"
        fix = "write package.module:function or path/file.py:function"
        yield ConfigIssue("reward.function", reward.function, why, fix)
    if reward.url and (problem := url_problem(reward.url)):
        fix = "write http://host:port/path; a key goes into reward.kwargs.api_key_env"
        yield ConfigIssue("reward.url", reward.url, problem, fix)
    if reward.overlong_buffer_len > case.recipe.data.max_response_length:
        yield ConfigIssue(
            "reward.overlong_buffer_len",
            reward.overlong_buffer_len,
            f"is longer than data.max_response_length = {case.recipe.data.max_response_length}",
            "lower it",
        )


@rule("reward")
def a_missing_end_is_answered_once(case: RuleContext) -> Iterator[ConfigIssue]:
    """A score that is replaced has nothing that a penalty could be taken from."""
    reward = case.recipe.reward
    if reward.missing_eos_score is not None and reward.missing_eos_penalty is not None:
        yield ConfigIssue(
            "reward.missing_eos_penalty",
            reward.missing_eos_penalty,
            f"reward.missing_eos_score = {reward.missing_eos_score} replaces the score it is "
            "taken from",
            "keep one of them",
        )


@rule("data.max_prompt_length", "data.max_response_length", "model")
def sequences_fit_positions(case: RuleContext) -> Iterator[ConfigIssue]:
    """Prompt and response fit the positions the model knows."""
    limit = case.positions
    data = case.recipe.data
    longest = data.max_prompt_length + data.max_response_length
    if limit is not None and longest > limit:
        yield ConfigIssue(
            "data.max_response_length",
            data.max_response_length,
            f"max_prompt_length + max_response_length = {longest} is more than the model's "
            f"{limit} positions",
            f"lower one of them by {longest - limit} tokens",
        )


@rule("data.task", "data.train_files", "data.task_kwargs")
def prompts_have_one_source(case: RuleContext) -> Iterator[ConfigIssue]:
    """Prompts come from a procedural task or from files, not from both or neither."""
    data = case.recipe.data
    if data.task and data.train_files:
        fix = "leave out data.task or data.train_files"
        yield ConfigIssue("data.task", data.task, "data.train_files is given too", fix)
    if not data.task and not data.train_files:
        fix = "set data.task (arithmetic, ...) or data.train_files ([train.jsonl])"
        yield ConfigIssue("data.task", None, "there is nothing to train on", fix)
    if data.task_kwargs and not data.task:
        why = "has no effect without data.task"
        yield ConfigIssue(
            "data.task_kwargs", data.task_kwargs, why, "set data.task, or leave it out"
        )


@rule("trainer.test_freq", "data.val_files", "data.val_size", "data.task")
def validation_has_prompts(case: RuleContext) -> Iterator[ConfigIssue]:
    """Validation every n steps needs something to validate on."""
    data, freq = case.recipe.data, case.recipe.trainer.test_freq
    if freq <= 0:
        return
    if data.val_size == 0:
        why = f"trainer.test_freq = {freq} asks for validation"
        yield ConfigIssue("data.val_size", 0, why, "give at least 1, or set test_freq to -1")
    elif data.train_files and not data.val_files:
        why = f"trainer.test_freq = {freq} asks for validation"
        yield ConfigIssue("data.val_files", [], why, "name a file, or set test_freq to -1")


@rule("trainer")
def resume_path_and_mode_agree(case: RuleContext) -> Iterator[ConfigIssue]:
    """A checkpoint named by path is taken in one resume mode only, which needs it."""
    trainer = case.recipe.trainer
    wanted, path = trainer.resume_mode == "resume_path", trainer.resume_from_path
    key = "trainer.resume_from_path"
    if wanted and not path:
        why = "trainer.resume_mode = resume_path needs it"
        yield ConfigIssue(key, None, why, "name a global_step_N folder")
    if path and not wanted:
        why = f"has no effect with trainer.resume_mode = {trainer.resume_mode}"
        yield ConfigIssue(key, path, why, "set resume_mode to resume_path, or leave it out")


@rule("trainer.best_metric", "trainer.save_freq", "trainer.save_every_minutes")
def best_checkpoint_needs_saves(case: RuleContext) -> Iterator[ConfigIssue]:
    """The best checkpoint is chosen among those saved on a schedule."""
    trainer = case.recipe.trainer
    if trainer.best_metric and trainer.save_freq <= 0 and trainer.save_every_minutes is None:
        why = "no checkpoint is saved on a schedule to choose from"
        fix = "set trainer.save_freq or trainer.save_every_minutes, or leave it out"
        yield ConfigIssue("trainer.best_metric", trainer.best_metric, why, fix)
