"""How long a step waits for agents whose tools are slow: in lockstep, and at their own pace.

    python benchmarks/episodes.py [--steps 6] [--median 1.0] [--sigma 1.0] [--repeat 2] [--out FILE]

Every episode has two turns, and a tool between them that takes a log-normal time (median and
sigma of its logarithm by option). One SGLang server apart from the training ranks serves all runs
of ``recipes/tiny_cpu_sglang_disaggregated.yaml``, ``--repeat`` times in this order: in lockstep
(``rollout.agent.path``: all conversations take their turns together), and as programs with
``rollout.max_staleness`` 0, 1 and 2, the last also with ``rollout.over_sampling`` 0.25.

For each: seconds that a step waits for its batch (``timing_s/gen``), seconds of a step, and the
mean age of its tokens in updates; means over the steps after the second, of both runs.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from math import log
from pathlib import Path
from statistics import mean

from record import parser, record

from mppo.parallel.addresses import free_port

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "recipes/tiny_cpu_sglang_disaggregated.yaml"
AGENT = """
import asyncio, random

def seconds(task):
    return random.Random(task).lognormvariate({mu}, {sigma})

async def run(client, task):
    messages = list(task["messages"])
    for turn in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = {{"role": "assistant", "content": answer.choices[0].message.content or ""}}
        messages = [*messages, said, {{"role": "user", "content": "more"}}]
        if not turn:
            await asyncio.sleep(seconds(task["prompt"]))
    return len(said["content"]) / 16

async def answer(conversation):
    if conversation.turn == 1:
        await asyncio.sleep(seconds(conversation.messages[0]["content"]))
        return {{"messages": [{{"role": "user", "content": "more"}}]}}
    return {{"done": True, "reward": len(conversation.text) / 16}}
"""
LOCKSTEP = "lockstep"
RUNS = {
    LOCKSTEP: ["rollout.agent.path={agent}:answer"],
    "staleness 0": ["rollout.agent.run={agent}:run"],
    "staleness 1": ["rollout.agent.run={agent}:run", "rollout.max_staleness=1"],
    "staleness 2": ["rollout.agent.run={agent}:run", "rollout.max_staleness=2"],
    "staleness 2, over-sampling .25": [
        "rollout.agent.run={agent}:run", "rollout.max_staleness=2", "rollout.over_sampling=0.25",
    ],
}  # fmt: skip


def steps_of(run: list[str], folder: Path, url: str, steps: int) -> list[dict[str, float]]:
    """Metrics of the steps of a run."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "mppo/train.py", "--config", RECIPE, f"rollout.urls=[{url}]", *run,
        f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}",
        "algorithm.rollout_correction.rollout_is=token", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "trainer.logger=[jsonl]",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def measure(steps: int, mu: float, sigma: float, repeat: int) -> dict[str, dict[str, float]]:
    """Means of each kind of run."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        agent = folder / "agent.py"
        agent.write_text(AGENT.format(mu=mu, sigma=sigma))
        os.environ["MPPO_ROLLOUT_API_KEY"] = secrets.token_hex(16)
        serve = ["--empty", "--config", RECIPE, "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen([sys.executable, "-m", "mppo.serve", *serve], cwd=ROOT)
        try:
            for turn in range(repeat):
                for kind, keys in RUNS.items():
                    run = [key.format(agent=agent) for key in keys]
                    place = folder / f"{turn} {kind.replace(',', '')}"
                    url = f"http://127.0.0.1:{port}"
                    found[kind] += steps_of(run, place, url, steps)[2:]
        finally:
            server.terminate()
            server.wait()
    names = {
        "waits_s": "timing_s/gen",
        "step_s": "timing_s/step",
        "age": "training/weight_version_lag_mean",
    }
    return {
        kind: {short: mean(row[name] for row in rows) for short, name in names.items()}
        for kind, rows in found.items()
    }


def main() -> None:
    """Measure, print and record."""
    options = parser(__doc__, repeat=2)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--median", type=float, default=1.0, help="seconds of a tool")
    options.add_argument("--sigma", type=float, default=1.0, help="of the logarithm")
    chosen = options.parse_args()
    result = measure(chosen.steps, log(chosen.median), chosen.sigma, chosen.repeat)
    for each in result.values():
        each["waits_over_lockstep"] = each["waits_s"] / result[LOCKSTEP]["waits_s"]
    record({kind: _rounded(each) for kind, each in result.items()}, chosen.out)


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 3) for name, number in numbers.items()}


if __name__ == "__main__":
    main()
