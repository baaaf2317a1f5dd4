"""Kill a training run repeatedly at random moments, and check that resumes lose nothing.

``make soak``, or ``python benchmarks/soak.py --minutes 10 --seed 0``. One run is undisturbed. Then
runs of the same recipe are killed with SIGKILL at random moments (a rank, the launcher; during a
checkpoint, after a step, during the start) or have a rank stopped with SIGSTOP, and are started
again until they finish. Each must end with exactly the weights and metrics of the undisturbed one.
Exit code 0 if all do.

With ``--engine offload`` actor and critic leave the device between their phases. With
``--engine sglang`` the SGLang server is killed too, and the run continues by itself. These
runs sample greedily, because a restarted server draws other random numbers, and the metrics that
contain the server's probabilities are not compared.

With ``--agents`` an agent's function asks for every answer, or (``--agents path``) answers every
turn. At least half of the kills then hit its processes, all by SIGKILL. Each step must have
trained on exactly the episodes of the undisturbed run, each once. With ``--staleness 1`` or more,
batches are the episodes that end first, and the rest goes on with later weights. Weights then
differ from run to run: no prompt may be trained on twice or passed over.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from record import parser, record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from launched_run import (  # noqa: E402
    metrics_logged,
    same_weights,
    start_under,
    steps_logged,
    torchrun,
)

SERVER, STOPPED, AGENT = "the server", "a rank, stopped", "an agent's process"
OF_TRAINING = ("a rank", STOPPED, "the launcher")
OFFLOAD = "megatron.offload={parameters: true, gradients: true, optimizer: true}"
ENGINES = {
    "local": (),
    "offload": (f"actor.{OFFLOAD}", f"critic.{OFFLOAD}"),
    "sglang": (
        "rollout.name=sglang",
        "rollout.top_k=1",
        "rollout.server_args={max_total_tokens: 4096}",
    ),
}
FORMS = {
    "run": ("rollout.agent.run=recipes/agents/guess_sums.py:run",),
    "path": (
        "rollout.agent.path=mppo.agents.number_hints:hint",
        "rollout.agent.arguments={too_low: '<', too_high: '>', unclear: '?'}",
    ),
}
AGENTS = (
    "rollout.agent.max_turns=3",
    f"rollout.stop_token_ids={list(range(10, 60))}",
    "data.max_response_length=32",
    "rollout.batch_size=1",  # a turn's log-probabilities are rounded as those of its batch
    "trainer.dump_rollouts=true",
)
"""An agent that dies ends the run (``reward.on_error`` is ``stop``), and the step runs again."""
OF_THE_SERVER = ("rollout", "training/rollout", "conversation/prefix_hit_rate")
"""Metrics of the server's probabilities, which are equal only up to rounding, and of its cache."""
BATCH = 8
"""Prompts of a step, ``data.train_batch_size`` of the tiny recipe."""
SECONDS = ("conversation/agent_s", "conversation/generation_s")
ENDS_WITHIN_S = 600.0
"""Much longer than the ranks and torchrun take to notice a rank that is stopped or lost."""
OUTLIVES_S = 180.0
"""Much longer than a process takes to notice that its parent has ended."""
MOMENTS = ("while saving", "while training", "soon after the start")


@dataclass
class Tally:
    """Kills and their results."""

    kills: Counter = field(default_factory=Counter)
    resumed_from: list[int] = field(default_factory=list)
    runs: int = 0
    failures: list[str] = field(default_factory=list)

    def summary(self) -> str:
        lines = [f"{self.runs} runs finished, {self.kills.total()} kills:"]
        lines += [f"  {count:3d} x {what}" for what, count in sorted(self.kills.items())]
        lines += [f"resumed from steps {self.resumed_from}"]
        lines += self.failures or ["every run ended as it must"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Job:
    """Settings of a soak.

    Args:
        overrides: recipe keys.
        targets: what may be killed.
        steps: PPO steps of a run.
        kills: number of kills after which the last run finishes.
        typical_s: seconds of an undisturbed run, its start included.
        deadline: on the monotonic clock.
        rng: chooses targets and moments.
        is_equal: whether each run equals the undisturbed one.
        left_out: beginnings of the names of metrics that are not compared.
    """

    overrides: Sequence[str]
    targets: Sequence[str]
    steps: int
    kills: int
    typical_s: float
    deadline: float
    rng: random.Random
    is_equal: bool
    left_out: tuple[str, ...]

    def over(self, tally: Tally) -> bool:
        """Whether enough processes were killed or the time is up."""
        return tally.kills.total() >= self.kills or time.monotonic() >= self.deadline

    def next_target(self, tally: Tally) -> str:
        """What is killed next; every second time at least an agent's process, if there are any."""
        of_agents = sum(n for what, n in tally.kills.items() if what.startswith(AGENT))
        is_due = AGENT in self.targets and 2 * of_agents <= tally.kills.total()
        return AGENT if is_due else self.rng.choice(self.targets)


def wait_for(moment: str, launcher: subprocess.Popen, run_dir: Path, typical_s: float, rng) -> bool:
    """Wait for a moment of this kind; False if the run ended before."""
    before, came = steps_logged(run_dir), None
    delay = rng.uniform(0, {"soon after the start": 0.5, "while training": 0.1}.get(moment, 0.0))
    while launcher.poll() is None:
        if came is None and (
            moment == "soon after the start"
            or (moment == "while training" and steps_logged(run_dir) > before)
            or (moment == "while saving" and is_saving(run_dir))
        ):
            came = time.monotonic()
        if came is not None and time.monotonic() >= came + delay * typical_s:
            return True
        time.sleep(0.002)
    return False


def is_saving(run_dir: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((run_dir / "checkpoints").glob(".global_step_*.partial"))


def kill(target: str, launcher: subprocess.Popen, rng) -> bool:
    """Kill or stop the target; False if it does not exist. If it is a rank, all must end."""
    family = psutil.Process(launcher.pid).children(recursive=True)
    commands = {p.pid: command_of(p) for p in family}
    ranks = [pid for pid, command in commands.items() if "train.py" in command]
    others = {
        SERVER: [p for p, command in commands.items() if "sglang" in command and p not in ranks],
        AGENT: [p for p, command in commands.items() if "mppo.agents.function_host" in command],
        "the launcher": [launcher.pid],
    }
    found = others.get(target, ranks)
    if not found:
        return False
    os.kill(rng.choice(found), signal.SIGSTOP if target == STOPPED else signal.SIGKILL)
    if target not in (SERVER, AGENT):
        launcher.wait(ENDS_WITHIN_S)
    return True


def command_of(process: psutil.Process) -> str:
    """A process's command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie, too
        return ""


def check_all_have_ended(root: Path) -> None:
    """Check that soon no process is left whose temporary files are in this folder."""
    deadline = time.monotonic() + OUTLIVES_S
    while left := [process for process in psutil.process_iter() if is_below(process, root)]:
        assert time.monotonic() < deadline, f"left: {[command_of(process) for process in left]}"
        time.sleep(0.2)


def is_below(process: psutil.Process, root: Path) -> bool:
    """Whether a process was started with its temporary files in this folder."""
    with suppress(psutil.Error):
        return process.environ().get("TMPDIR", "").startswith(str(root))
    return False


def disturb(run_dir: Path, job: Job, tally: Tally) -> None:
    """Kill and resume one run until it finishes; stop killing after ``kills`` kills."""
    while True:
        launcher, killed = start_under(torchrun(), run_dir, job.steps, job.overrides), set()
        while not job.over(tally):
            target, moment = job.next_target(tally), job.rng.choice(MOMENTS)
            if not wait_for(moment, launcher, run_dir, job.typical_s, job.rng):
                break
            if kill(target, launcher, job.rng):
                tally.kills[f"{target}, {moment}"] += 1
                killed.add(target)
        code = launcher.wait()
        check_all_have_ended(run_dir.parent)
        if code == 0:
            return
        if not killed - {SERVER}:
            tally.failures.append(f"{run_dir}: ended with {code}, see output.txt")
            return


def compare(run_dir: Path, reference: Path, left_out: tuple[str, ...]) -> list[str]:
    """Differences between two finished runs, without metrics with these beginnings."""
    found = [] if same_weights(run_dir, reference) else [f"{run_dir}: weights differ"]
    if episodes(run_dir) != episodes(reference):
        found.append(f"{run_dir}: episodes differ")
    ours, theirs = metrics_logged(run_dir), metrics_logged(reference)
    if len(ours) != len(theirs):
        return [*found, f"{run_dir}: {len(ours)} steps logged, not {len(theirs)}"]
    for a, b in zip(ours, theirs):
        names = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
        names = [name for name in names if not name.startswith(left_out)]
        found += [f"{run_dir}: step {a['step']}: {', '.join(names)} differ"] if names else []
    return found


def wrong_prompts(run_dir: Path, steps: int) -> list[str]:
    """Steps of a finished run that are missing, and prompts that were trained on twice or passed
    over: a step chooses among twice as many prompts as it takes, and leaves none for good."""
    logged = [int(line["step"]) for line in metrics_logged(run_dir)]
    if logged != list(range(1, steps + 1)):
        return [f"{run_dir}: steps {logged} logged, not {steps}"]
    taken: list[int] = []
    for step in range(1, steps + 1):
        rows = episodes(run_dir).get(f"step_{step}", [])
        uids = sorted({int(str(row["uid"])) for row in rows})
        if len(uids) != BATCH or set(uids) & set(taken) or uids[-1] >= (step + 1) * BATCH:
            return [f"{run_dir}: step {step} trained on {uids} after {taken}"]
        taken += uids
    return []


def episodes(run_dir: Path) -> dict[str, list[dict[str, object]]]:
    """The sequences of each dumped step, in their order."""
    headers = sorted(run_dir.glob("rollouts/step_*/step.json"))
    return {header.parent.name: json.loads(header.read_text())["rows"] for header in headers}


def resumed_steps(run_dir: Path) -> list[int]:
    """The steps from which a run was resumed, by the checkpoints named in its output."""
    text = (run_dir / "output.txt").read_text()
    return [int(part.split()[0]) for part in text.split("after step ")[1:]]


def soak(root: Path, reference: Path, job: Job) -> Tally:
    """Kill runs until there were enough kills or the time is up; the last run finishes."""
    tally = Tally()
    while not tally.failures and not job.over(tally):
        run_dir = root / f"run_{tally.runs}"
        disturb(run_dir, job, tally)
        tally.resumed_from += resumed_steps(run_dir)
        tally.runs += 1
        tally.failures = tally.failures or (
            compare(run_dir, reference, job.left_out)
            if job.is_equal
            else wrong_prompts(run_dir, job.steps)
        )
        print(f"run {tally.runs}: {tally.kills.total()} kills so far", flush=True)
    for folder in {failure.split(":")[0] for failure in tally.failures}:
        print((Path(folder) / "output.txt").read_text()[-3000:])
    return tally


def agent_keys(form: str | None, staleness: int) -> tuple[str, ...]:
    """The recipe's keys of an agent in this form; none without one."""
    if form is None:
        return ()
    stale = (f"rollout.max_staleness={staleness}", "rollout.over_sampling=1")
    return (*FORMS[form], *AGENTS, *(stale if staleness else ()))


def result(tally: Tally, minutes: float) -> dict[str, object]:
    """The content of a record."""
    return {
        "minutes": round(minutes, 1),
        "runs_finished": tally.runs,
        "kills": dict(sorted(tally.kills.items())),
        "kills_in_all": tally.kills.total(),
        "resumed_from_steps": tally.resumed_from,
        "failures": tally.failures,
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--kills", type=int, default=20, help="then the last run finishes")
    options.add_argument("--engine", choices=list(ENGINES), default="local")
    form = "how an agent's function takes part: it asks (run) or answers (path)"
    options.add_argument("--agents", choices=list(FORMS), nargs="?", const="run", help=form)
    options.add_argument("--staleness", type=int, default=0, help="with --agents: max_staleness")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    is_sglang = arguments.engine == "sglang"
    if arguments.staleness and not arguments.agents:
        options.error("--staleness needs --agents")
    overrides = (*ENGINES[arguments.engine], *agent_keys(arguments.agents, arguments.staleness))
    targets = (*OF_TRAINING, *[SERVER] * is_sglang)
    if arguments.agents:
        targets = (*[each for each in targets if each != STOPPED], AGENT)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mppo_soak_") as folder:
        os.environ["TMPDIR"] = folder
        root = Path(folder)
        reference = root / "undisturbed"
        if start_under(torchrun(), reference, arguments.steps, overrides).wait() != 0:
            print((reference / "output.txt").read_text())
            return 1
        assert len(episodes(reference)) == (arguments.steps if arguments.agents else 0)
        typical_s = time.monotonic() - began
        print(f"undisturbed: {arguments.steps} steps in {typical_s:.0f} s", flush=True)
        job = Job(
            overrides, targets, arguments.steps, arguments.kills, typical_s,
            began + 60 * arguments.minutes, random.Random(arguments.seed), not arguments.staleness,
            (*SECONDS, *OF_THE_SERVER) if is_sglang else SECONDS,
        )  # fmt: skip
        tally = soak(root, reference, job)
    print(tally.summary())
    record(result(tally, (time.monotonic() - began) / 60), arguments.out)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
