"""The recipe's ``trainer`` section: length, checkpoints, reports and supervision of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from mppo.recipe.sections.section import Section


class ValueGateConfig(Section):
    """When value pretraining ends: its explained variance, over one batch after another."""

    explained_var: float = Field(default=0.5, ge=0, lt=1)
    """Explained variance of a batch's returns that the critic must reach, over tokens and over
    episodes of equal weight. A batch whose returns are all equal has none and does not count."""
    batches: int = Field(default=3, gt=0)
    """Batches in a row that must reach it. Each is judged before the critic learns it; of
    ``trainer.replay`` the last ones are held out for it."""


class ProfileConfig(Section):
    """Traces of torch's profiler in ``<run>/profile``, and snapshots of GPU memory."""

    steps: tuple[PositiveInt, ...] = ()
    """PPO steps that are profiled. A profiled step is slower."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Ranks that are profiled."""


class TimelineConfig(Section):
    """Recording of updates, action by action, in ``<run>/timeline``."""

    steps: tuple[PositiveInt, ...] = ()
    """PPO steps that are recorded, by events on the device's stream, without waiting for it."""


class TrainerConfig(Section):
    """The run: how long, how often, where to."""

    project_name: str = "mppo"
    """Project in reports and trackers."""
    experiment_name: str = "run"
    """Name of the run in reports and trackers."""
    default_local_dir: str | None = None
    """The run folder. null: ``runs/<experiment_name>``."""
    plugins: tuple[str, ...] = ()
    """Python files that add estimators, policy losses, verifiers, metrics and model families
    (``mppo.register``). Every rank executes them before the recipe is checked."""
    total_epochs: int = Field(default=1, gt=0)
    """Passes over the training prompts, where ``total_training_steps`` is null."""
    total_training_steps: int | None = Field(default=None, gt=0)
    """PPO steps of the run. null: those of ``total_epochs``."""
    warm_start_steps: int = Field(default=0, ge=0)
    """Supervised steps on right answers before PPO, for models with random weights."""
    warm_start_batch_size: int = Field(default=64, gt=0)
    """Sequences per step of the warm start."""
    warm_start_lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the warm start (cosine decay)."""
    val_before_train: bool = True
    """Validate before the first step."""
    test_freq: int = Field(default=-1, ge=-1)
    """Validate every this many PPO steps; -1: never."""
    validation_data_dir: str | None = None
    """Folder for the validation responses with their scores, one file ``STEP.jsonl`` per
    validation. null: they are not written."""
    save_freq: int = Field(default=-1, ge=-1)
    """Save a checkpoint every this many PPO steps and after the last; -1: not by steps."""
    save_every_minutes: float | None = Field(default=None, gt=0)
    """Save a checkpoint when this many minutes have passed since the last one, and after the last
    step. null: not by time."""
    checkpoint_must_save_by: str | None = Field(
        default=None, pattern=r"^(\d+:)?\d{1,2}:\d{2}:\d{2}$"
    )
    """Time limit of the job since its start, ``[DD:]HH:MM:SS``: the run saves and stops before it.
    null: no limit."""
    save_on_signal: bool = True
    """Save a checkpoint when the run is stopped by a signal."""
    stop_within_s: float | None = Field(default=20.0, ge=0)
    """After SIGTERM or Ctrl-C, a step that needs more than this many seconds is abandoned. null:
    the step always finishes."""
    async_save: bool = True
    """Write checkpoints in the background, from a copy in host memory."""
    max_ckpt_to_keep: int | None = Field(default=None, gt=0)
    """Newest checkpoints that are kept. null: all."""
    best_metric: str | None = None
    """Metric whose best checkpoint is kept too, with a link ``best`` to it: the highest, or with
    ``-name`` the lowest. null: none."""
    checkpoint_hf: bool = False
    """Also export the actor (in value pretraining the critic) with every checkpoint, as a Hugging
    Face folder ``hf/global_step_N``."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Start from the newest complete checkpoint of the run folder (auto), from the beginning
    (disable), or from ``resume_from_path``."""
    resume_from_path: str | None = None
    """A ``global_step_N`` folder, for ``resume_mode: resume_path``."""
    on_existing_run: Literal["refuse", "set_aside"] = "refuse"
    """For a run folder that holds results of another recipe and no checkpoint: refuse to start, or
    move them into its subfolder ``earlier-N``."""
    on_changed_data: Literal["refuse", "accept"] = "refuse"
    """For training prompts or plain text of another content than the checkpoint was trained on:
    refuse to resume, or continue at the same position of the new content."""
    export_hf: bool = True
    """Export the actor (in value pretraining the critic) at the end of the run, as a Hugging Face
    folder."""
    critic_warmup: int = Field(default=0, ge=0)
    """First PPO steps in which only the critic is trained."""
    stage: Literal["ppo", "value_pretraining"] = "ppo"
    """value_pretraining: only the critic is trained, until ``value_gate`` holds. The actor stays as
    it is and has no optimizer; what is exported, as ``<run>/critic``, is the critic, from which a
    run starts with ``critic.path`` (docs/algorithms.md)."""
    value_gate: ValueGateConfig = ValueGateConfig()
    """When value pretraining ends."""
    logger: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab"], ...] = (
        "console",
        "jsonl",
    )
    """Where metrics and tables of responses go."""
    console: Literal["live", "lines", "quiet"] = "live"
    """What ``console`` prints: lines, and on a terminal a live display below them (live); only
    lines (lines); neither lines nor samples of steps (quiet, or ``-q``)."""
    sample_table_rows: int = Field(default=4, ge=0)
    """Responses of a table, which is shown and written to samples.jsonl: the best and the worst of
    the step, then its first ones."""
    num_sample_generations: int | None = Field(default=None, ge=0)
    """Tables of responses during the run, at equal distances from the first step on (TRL's key);
    0: none. null: at the first, middle and last step."""
    nnodes: int | None = Field(default=None, gt=0)
    """Nodes of the job. If ``n_gpus_per_node`` is set too, their product must be the number of
    ranks that were started. null: not checked; --dry-run plans for one node."""
    n_gpus_per_node: int | None = Field(default=None, gt=0)
    """Ranks per node. null: not checked; --dry-run plans for the fewest ranks that fit."""
    gpu: str | float | None = None
    """GPU for which memory is planned: its type, such as h100-80gb or h200-141gb, or its memory in
    GiB. null: in a run, the GPU of the rank; for --dry-run and mppo-simulate, h100-80gb."""
    host_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of a node that the run may use, in GiB. null: in a run, the node's physical memory or
    its cgroup's limit, whichever is smaller; --dry-run prints the need without a verdict on it."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a collective waits for a missing rank."""
    heartbeat_timeout_s: float = Field(default=20.0, ge=2)
    """Seconds without a heartbeat after which a rank counts as dead."""
    hang_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds without progress on any rank after which the job ends. null: 0.9 x
    ``collective_timeout_s``."""
    schedule: Literal["auto", "sequential", "fused", "flush_free"] = "auto"
    """How actor and critic share the pipeline in an update (docs/schedule.md): one after the other
    (sequential), filling it once for each pair of mini-batches (fused), or once per update
    (flush_free). auto: flush_free, or fused with ``align_overflow``; sequential if the layouts
    allow neither."""
    dump_rollouts: bool = False
    """Write every step's responses with scores, log-probabilities, values and advantages to
    ``<run>/rollouts``, for ``replay``, ``mppo-inspect`` and the report."""
    replay: str | None = None
    """A run folder with dumped rollouts: train on its responses and scores, without an engine and
    without validation. null: generate responses."""
    timeline: TimelineConfig = TimelineConfig()
    """PPO steps whose updates are recorded action by action."""
    profile: ProfileConfig = ProfileConfig()
    """PPO steps that torch's profiler records."""
    align_overflow: bool = False
    """Skip the optimizer steps of actor and critic together if the loss or gradient of one of them
    is not finite (DeepSpeed-Chat's key). false: skip only that role's step."""
    on_nonfinite: Literal["skip", "stop"] = "stop"
    """For a mini-batch whose loss or gradient is not finite: skip its optimizer step, or stop the
    run."""
    max_nonfinite_in_a_row: int = Field(default=3, gt=0)
    """With ``on_nonfinite: skip``, optimizer steps of a role skipped in a row after which the run
    stops."""
    peak_tflops_per_rank: float | None = Field(default=None, gt=0)
    """Peak of one device in TFLOP/s, the denominator of ``perf/mfu/*``. null: the GPU's dense
    bfloat16 peak, by its name; without one ``perf/mfu/*`` is not reported."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights of a built-in model and of a new value head, the warm start,
    sampling, shuffling and resampling. ``data.seed`` orders the prompts."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.default_local_dir or Path("runs") / self.experiment_name)
