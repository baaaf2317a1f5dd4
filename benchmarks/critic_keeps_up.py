"""Does the critic keep up: SAO on old samples and without its parts, and value pretraining.

    python benchmarks/critic_keeps_up.py [--seeds 0 1 2] [--steps 60] [--cases sao@8 ppo@8 ...]
        [--earlier FILE ...] [--runs FOLDER] [--out FILE]

A model of two layers (width 64) reverses words; the reward comes with the last token, 1 if all of
the answer is right. Each seed draws a model and warms it up once; every case starts from it, with
the same prompts, and updates the actor once per step. ``@K``: each token was sampled K updates ago,
because the engine gets the weights of an update K updates late. A reward that still rises is lower
in older samples. So cases are compared by the current weights: after every update, the chance that
a sample at training's temperature is the right answer, a product of token probabilities, for words
drawn as in training, and for those held out from it. Sampled rewards are compared with those of
``ppo@0`` after as many updates, that is K steps earlier.

``sao`` is the preset, ``no_dis``, ``k1`` and ``no_freeze`` are it with PPO's clipped loss, with one
update of the critic per step, and with a critic that is trained as a whole. ``ppo`` is PPO (GAE of
lambda 0.95), ``no_dis`` and ``ppo`` take the ratio to the policy of the step, not to the older one
that sampled. Learning rates, batch and the first steps of the critic alone are the same for all,
and those of a tiny model, not the preset's.

``values`` is a value pretraining until its gate holds, ``pretrained`` and ``fresh`` are the first
step of ``sao@0`` with its critic and with a new one. Their reward is not the word's: it counts a
letter of the answer (``letters_said.py``), so the tokens so far say more and more of it, and their
batches are larger. How much of either reward any critic can explain is computed too: from each
state of sampled answers the actor goes on several times, and what these differ by is unknowable.

The rates were chosen with seed 0, the counted reward with seed 3: judge each by other seeds. A
finished run in ``--runs`` is not repeated; the seeds of ``--earlier`` results, but for seed 0, are
put into the same tables. Writes ``<out>.json`` (chances, reward and explained variance of every
step), ``<out>.svg`` and ``<out>.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev, variance
from typing import Any

import letters_said
import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from record import conditions
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from value_head import FINISHED, draw_model

import mppo.rollout.local.local_engine as local
from mppo.data.tasks import Split, split_examples, task
from mppo.recipe.sections.trainer import ValueGateConfig
from mppo.rewards.verifiers import exact
from mppo.train import main as train
from mppo.weights.bucket import NamedTensors

SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
"""Of the model, which otherwise is ``builtin:tiny``."""
WORDS, LONGEST = {"min_length": 1, "max_length": 4, "alphabet": "abcd"}, 6
"""The words, and most tokens of an answer."""
RECIPE = [
    "model.dtype=float32",
    "data.task=reverse",
    f"data.task_kwargs={WORDS}",
    "data.max_prompt_length=16",
    f"data.max_response_length={LONGEST}",
    "data.train_batch_size=64",
    "data.val_size=4",
    "actor.ppo_mini_batch_size=64",
    "actor.ppo_micro_batch_size_per_gpu=64",
    "actor.optim.lr=3e-4",
    "critic.ppo_micro_batch_size_per_gpu=64",
    "critic.optim.lr=2e-3",
    "rollout.name=local",
    "rollout.batch_size=64",
    "trainer.warm_start_batch_size=32",
    "trainer.val_before_train=false",
    "trainer.logger=[jsonl]",
    "trainer.num_sample_generations=0",
]
WARM_START, ALONE, PRETRAINING = 220, 5, 100
"""Supervised steps before each case, steps of the critic alone, most steps of value pretraining."""
GATE = 0.5
COUNTED = [
    "reward.name=function", f"reward.function={Path(letters_said.__file__).resolve()}:score",
    "data.train_batch_size=256",
]  # fmt: skip
SAO = ["algorithm.preset=sao"]
OWN_RATIO = [
    "actor.policy_loss.loss_mode=vanilla", "algorithm.rollout_correction.bypass_mode=false",
    "actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.2",
]  # fmt: skip
KINDS = {
    "sao": SAO,
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.lam=0.95"],
    "no_dis": [*SAO, *OWN_RATIO],
    "k1": [*SAO, "critic.ppo_epochs=1"],
    "no_freeze": [*SAO, "critic.freeze=[]"],
}
CASES = [
    "ppo@0", "sao@0", "sao@8", "ppo@8", "no_dis@8", "sao@4", "sao@1", "k1@8", "no_freeze@8",
]  # fmt: skip
STARTS = ("values", "pretrained", "fresh")
BASE = "ppo@0"
"""The case that the others' rewards are compared with."""
COMPLETE = "sao@8"
PAPER = (
    "SAO's paper (AIME25, BeyondAIME): without DIS -6.0 and -5.8 points, without K -2.3 and -5.0, "
    "without freezing -6.7 and -0.3."
)
SHOWN = {
    "by age": ["ppo@0", "sao@0", "sao@1", "sao@4", "sao@8", "ppo@8"],
    "without a part": ["sao@8", "no_dis@8", "k1@8", "no_freeze@8"],
}
"""The cases of each plot."""
LAST = 10
"""Rewards are compared by their means over so many last steps."""
TUNED = 0
"""The learning rates were chosen with this seed."""
DRAWN = 4000
"""Words drawn as in training, over which a chance is computed."""
CHANCES = "chances.json"
SPLITS: tuple[Split, ...] = ("train", "val")
REWARD, EXPLAINED, HELD = "critic/score/mean", "critic/vf_explained_var", "critic/gate_batches"
WORD, COUNT = "the whole word right", "the count of a letter"
REWARDS: dict[str, Callable[[str, str], float]] = {
    WORD: lambda answer, right: exact(answer, right, {}),
    COUNT: lambda answer, right: letters_said.score("", answer, right, None),
}
"""Of an answer and the right one."""
CONTINUED = 16
"""Continuations from each state of an answer."""


@dataclass
class Curves:
    """What a case's runs logged in every step, one list for each of ``seeds``; None: undefined.

    ``train`` and ``val`` are the chances of the right answer after each update, on words of
    training and on held-out ones; ``held``: whether the gate of a value pretraining held at its
    end.
    """

    seeds: list[int] = field(default_factory=list)
    train: list[list[float]] = field(default_factory=list)
    val: list[list[float]] = field(default_factory=list)
    reward: list[list[float]] = field(default_factory=list)
    explained: list[list[float | None]] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)

    def add(self, seed: int, rows: Sequence[dict[str, float]]) -> None:
        """Add the run of one more seed."""
        self.seeds.append(seed)
        for split in SPLITS:
            getattr(self, split).append([round(row[split], 4) for row in rows])
        self.reward.append([round(row[REWARD], 4) for row in rows])
        known = [row.get(EXPLAINED) for row in rows]
        self.explained.append([None if x is None else round(x, 4) for x in known])
        if HELD in rows[-1]:
            self.held.append(rows[-1][HELD] >= ValueGateConfig().batches)


Found = dict[str, Curves]
"""By case."""
Limits = dict[str, list[float | None]]
"""What a perfect critic would explain, by reward: of every seed; None where it is undefined."""


class LateEngine(local.LocalEngine):
    """The local engine with the weights of ``late`` updates ago.

    ``chances``: of the right answer with the weights of every update so far, by split.
    """

    late = 0
    chances: dict[Split, list[float]]

    def __init__(self, hf_folder: str | Path, *arguments: Any, **options: Any) -> None:
        super().__init__(hf_folder, *arguments, **options)
        self._kept: deque[tuple[list[list[tuple[str, Tensor]]], int]] = deque(maxlen=self.late + 1)
        tokenizer = AutoTokenizer.from_pretrained(hf_folder)
        self._words = {split: answers_of(tokenizer, split) for split in SPLITS}
        type(self).chances = {split: [] for split in SPLITS}

    def update_weights(self, buckets: Iterable[NamedTensors], version: int) -> None:
        """See ``LocalEngine``; the weights given are those of ``late`` calls later."""
        copied = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in buckets]
        self._kept.append((copied, version))
        super().update_weights(copied, version)
        for split, words in self._words.items():
            logprobs = self.logprobs([[*prompt, *answer] for prompt, answer in words])
            each = zip(logprobs, words.items())
            right = sum(n * math.exp(sum(x[-len(answer) :])) for x, ((_, answer), n) in each)
            self.chances[split].append(right / words.total())
        super().update_weights(*self._kept[0])


def answers_of(tokenizer: Any, split: Split) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens of each word's prompt and right answer, and how often the word was drawn."""
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for example in split_examples(task("reverse", **WORDS), split, DRAWN):
        chat = [{"role": "user", "content": example.prompt}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer = tokenizer.encode(example.answer, add_special_tokens=False)
        found[tuple(prompt), (*answer, tokenizer.eos_token_id)] += 1
    return found


def rows_of(run: Path, seed: int, steps: int, settings: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of every step of a run, trained unless it has finished."""
    if not (run / FINISHED).exists():
        shutil.rmtree(run, ignore_errors=True)
        chosen = {setting.split("=")[0]: setting for setting in [*RECIPE, *settings]}
        code = train([
            "--quiet", *chosen.values(), f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={run}", f"trainer.seed={seed}", f"data.seed={seed}",
        ])  # fmt: skip
        if code and not (run / "critic").exists():  # 1 if the gate of a value pretraining fails
            raise SystemExit(code)
        (run / CHANCES).write_text(json.dumps(LateEngine.chances))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / FINISHED).touch()
    rows = [row for row in rows if REWARD in row]
    for split, (_, *chances) in json.loads((run / CHANCES).read_text()).items():
        for row, chance in zip(rows, chances, strict=True):
            row[split] = chance
    return rows


def warmed_up(seed: int, steps: int, place: Path) -> str:
    """The setting of the model that every case of a seed starts from."""
    if not (place / "warm" / FINISHED).exists():
        draw_model(seed, place / "model", SIZE)
    first = [f"model.path={place / 'model'}", f"trainer.warm_start_steps={steps}"]
    rows_of(place / "warm", seed, 1, [*first, *KINDS["ppo"], "trainer.export_hf=false"])
    return f"model.path={place / 'warm' / 'warm_start'}"


def run_case(
    case: str, seed: int, arguments: argparse.Namespace, place: Path
) -> list[dict[str, float]]:
    """The metrics of a case, one row per step."""
    model = warmed_up(seed, arguments.warm_start, place)
    kind, _, late = case.partition("@")
    LateEngine.late = int(late or 0)
    if kind not in STARTS:
        alone = f"trainer.critic_warmup={min(ALONE, arguments.steps)}"
        settings = [model, *KINDS[kind], alone, "trainer.export_hf=false"]
        return rows_of(place / case, seed, arguments.steps, settings)
    settings = [model, *SAO, *COUNTED, "trainer.critic_warmup=0"]
    if kind != "fresh":
        stage = ["trainer.stage=value_pretraining", f"trainer.value_gate.explained_var={GATE}"]
        own = seed + 100  # other prompts and answers than those of the step that is judged
        rows = rows_of(place / "values", own, arguments.pretraining, [*settings, *stage])
        if kind == "values":
            return rows
        settings.append(f"critic.path={place / 'values' / 'critic'}")
    return rows_of(place / case, seed, 1, [*settings, "trainer.export_hf=false"])


@torch.no_grad()
def continued(model: Any, states: Sequence[list[int]], end: int) -> list[list[int]]:
    """Each state, the tokens of a prompt and of an answer's beginning, with the answer's rest."""
    rows = [list(state) for state in states]
    open_rows = list(rows)
    for _ in range(LONGEST):
        by_length: dict[int, list[list[int]]] = {}
        for row in open_rows:
            by_length.setdefault(len(row), []).append(row)
        for same in by_length.values():
            logits = model(torch.tensor(same)).logits[:, -1]
            drawn = torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()
            for row, token in zip(same, drawn):
                row.append(token)
        open_rows = [row for row in open_rows if row[-1] != end]
    return rows


def explainable(folder: Path, seed: int, count: int) -> dict[str, float | None]:
    """The explained variance of a perfect critic, ``1 - E[var(R | state)] / var(R)``, by reward.

    None where it is undefined, because all returns are equal.

    Over the states before each token of sampled answers, like ``critic/vf_explained_var``. The
    variance given a state is that of the scores of ``CONTINUED`` continuations.

    Args:
        folder: of the actor.
        seed: of words and answers.
        count: answers.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words, end = task("reverse", seed=seed, **WORDS), tokenizer.eos_token_id
    returns, unknown = ({name: [] for name in REWARDS} for _ in range(2))
    for example in map(words.example, range(count)):
        chat = [{"role": "user", "content": example.prompt}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        [answer] = continued(model, [prompt], end)
        states = [answer[:length] for length in range(len(prompt), len(answer))]
        ends = [answer, *continued(model, [x for x in states for _ in range(CONTINUED)], end)]
        texts = tokenizer.batch_decode([x[len(prompt) :] for x in ends], skip_special_tokens=True)
        for name, score in REWARDS.items():
            own, *others = (score(text, example.answer) for text in texts)
            returns[name] += [own] * len(states)
            unknown[name] += torch.tensor(others).view(-1, CONTINUED).var(1).tolist()
    found: dict[str, float | None] = {}
    for name in REWARDS:
        total = variance(returns[name])
        found[name] = round(1 - mean(unknown[name]) / total, 4) if total else None
    return found


def add_earlier(found: Found, result: Path) -> None:
    """Add the curves of an earlier result, of other seeds."""
    content = json.loads(result.read_text())
    for case in (case for case in found if case in content["cases"]):
        earlier, curves = content["cases"][case], found[case]
        for place, seed in enumerate(earlier.get("seeds", content["seeds"])):
            if seed != TUNED and seed not in curves.seeds:
                curves.seeds.append(seed)
                for name in ("train", "val", "reward", "explained"):
                    getattr(curves, name).extend(earlier.get(name, [])[place : place + 1])


def spread(values: Sequence[float]) -> str:
    """Mean and, of several, standard deviation."""
    deviation = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{deviation}"


def table(found: Found) -> str:
    """The results of the ages and parts in Markdown."""
    titles = [
        "case", "seeds", "right, current weights", f"over `{BASE}`", "right, held-out words",
        f"over `{BASE}`", "sampled reward", f"over `{BASE}` after as many updates",
        "explained variance",
    ]  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for case in (case for case in found if case not in STARTS and found[case].seeds):
        cells = [f"`{case}`", ", ".join(map(str, found[case].seeds))]
        for name in (*SPLITS, "reward"):
            # a sample is of the weights of as many updates ago
            earlier = int(case.partition("@")[2]) if name == "reward" else 0
            ends, bases = ends_of(found, case, name), ends_of(found, BASE, name, earlier)
            both = [seed for seed in ends if seed in bases]
            base = sum(bases[seed] for seed in both)
            over = f"{sum(ends[seed] for seed in both) / base:.2f}" if base else "-"
            cells += [spread(list(ends.values())) if ends else "-", over]
        known = [[x for x in curve[-LAST:] if x is not None] for curve in found[case].explained]
        cells.append(spread([mean(each) for each in known if each]) if any(known) else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def ends_of(found: Found, case: str, name: str, earlier: int = 0) -> dict[int, float]:
    """Mean of a curve's last steps, or of as many earlier ones, by seed."""
    if case not in found:
        return {}
    pairs = zip(found[case].seeds, getattr(found[case], name))
    ends = {seed: curve[: len(curve) - earlier][-LAST:] for seed, curve in pairs}
    return {seed: mean(end) for seed, end in ends.items() if end}


def without_parts(found: Found) -> str:
    """What is lost without each part of SAO, in Markdown, by seed."""
    lines = []
    for name, what in {"train": "Right answers of the current weights", "reward": "Reward"}.items():
        complete = ends_of(found, COMPLETE, name)
        for case in (case for case in SHOWN["without a part"] if case != COMPLETE):
            ends = ends_of(found, case, name)
            losses = [complete[seed] - end for seed, end in ends.items() if seed in complete]
            if len(losses) > 1:
                each = ", ".join(f"{loss:+.3f}" for loss in losses)
                error = stdev(losses) / math.sqrt(len(losses))
                verdict = "more" if mean(losses) > 2 * error else "not more"
                lines.append(
                    f"- {what}, `{case}`: {each}; mean {mean(losses):+.3f}, {verdict} than twice "
                    f"its standard error ({error:.3f})."
                )
    first = f"Lost against `{COMPLETE}` without a part, by seed. {PAPER}"
    return "\n".join([first, "", *lines]) if lines else ""


def of_values(found: Found, limits: Limits) -> str:
    """The results of the value pretraining in Markdown, numbers by seed."""
    lines = []
    for reward, numbers in limits.items():
        lines.append(f"Reward: {reward}. A perfect critic would explain {in_a_row(numbers)}.")
    for case in (case for case in STARTS if case in found):
        what = "Explained variance at step 1"
        index = 0
        if case == "values":
            ends = zip(found[case].explained, found[case].held)
            each = [f"{len(x)} ({'held' if held else 'did not hold'})" for x, held in ends]
            lines.append(f"Batches of `{case}`, and its gate of {GATE}: {', '.join(each)}.")
            what, index = "Explained variance in the last batch", -1
        lines.append(f"{what}, `{case}`: {in_a_row([x[index] for x in found[case].explained])}.")
    return "\n\n".join(lines)


def in_a_row(numbers: Sequence[float | None]) -> str:
    """Numbers with two digits; None is undefined."""
    return ", ".join("undefined" if x is None else f"{x:.2f}" for x in numbers)


def plot(found: Found, limits: Limits, path: Path) -> None:
    """Mean over the seeds by step, by age and without each part; the value pretraining."""
    plt.rcParams["svg.hashsalt"] = "critic"
    shown = {
        title: [x for x in cases if x in found and found[x].seeds] for title, cases in SHOWN.items()
    }
    shown = {title: cases for title, cases in shown.items() if cases}
    columns = len(shown) + ("values" in found)
    figure, axes = plt.subplots(1, columns, figsize=(5.5 * columns, 3.8), squeeze=False)
    for axis, (title, cases) in zip(axes[0], shown.items()):
        for case in cases:
            curves = found[case].train or found[case].reward
            means = [mean(column) for column in zip(*curves)]
            smooth = [mean(means[max(0, end - 5) : end]) for end in range(1, len(means) + 1)]
            axis.plot(range(1, len(smooth) + 1), smooth, label=case)
        what = "right, current weights" if found[cases[0]].train else "sampled reward"
        axis.set(title=title, xlabel="step", ylabel=f"{what} (5 steps)", ylim=(0, 1))
        axis.legend(loc="upper left")
    if "values" in found:
        axis = axes[0, -1]
        for curve in found["values"].explained:
            axis.plot(range(1, len(curve) + 1), curve)
        axis.axhline(GATE, color="gray", linestyle=":", label="gate")
        for best in (x for x in limits[COUNT] if x is not None):
            axis.axhline(best, color="black", linestyle="--", linewidth=0.7)
        axis.plot([], [], color="black", linestyle="--", label="a perfect critic, by seed")
        axis.set(title="value pretraining, by seed", xlabel="batch", ylabel="explained variance")
        axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write(found: Found, limits: Limits, out: Path) -> None:
    """Write curves, plot and table."""
    facts = conditions()
    out.parent.mkdir(parents=True, exist_ok=True)
    cases = {case: asdict(curves) for case, curves in found.items()}
    text = json.dumps({**facts, "explainable": limits, "cases": cases})
    out.with_suffix(".json").write_text(text + "\n")
    plot(found, limits, out.with_suffix(".svg"))
    lines = [
        "# A critic that keeps up",
        f"`{facts['command']}`, {facts['date']}. Mean over the seeds ± standard deviation, "
        f"and of the last {LAST} updates.",
        f"![by step]({out.with_suffix('.svg').name})", table(found), without_parts(found),
        of_values(found, limits),
    ]  # fmt: skip
    out.with_suffix(".md").write_text("\n\n".join(filter(None, lines)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-start", type=int, default=WARM_START)
    parser.add_argument("--pretraining", type=int, default=PRETRAINING)
    known = [*STARTS, *CASES]
    parser.add_argument("--cases", nargs="+", default=known, choices=known)
    parser.add_argument("--answers", type=int, default=200, help="to see what can be explained")
    parser.add_argument(
        "--earlier", type=Path, nargs="*", default=[], help="results of other seeds"
    )
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in")
    out = Path(__file__).parent / "results/critic_keeps_up"
    parser.add_argument("--out", type=Path, default=out, help="without ending")
    arguments = parser.parse_args()
    local.LocalEngine = LateEngine
    found: Found = {case: Curves() for case in arguments.cases}
    limits: Limits = {reward: [] for reward in REWARDS} if "values" in arguments.cases else {}
    with tempfile.TemporaryDirectory() as folder:
        runs = (arguments.runs or Path(folder)).resolve()
        for seed in arguments.seeds:
            for case in arguments.cases:
                rows = run_case(case, seed, arguments, runs / str(seed))
                found[case].add(seed, rows)
                print(
                    f"seed {seed}, {case}: {mean(row['train'] for row in rows[-LAST:]):.3f}",
                    flush=True,
                )
            if limits:
                model = Path(warmed_up(seed, arguments.warm_start, runs / str(seed)).split("=")[1])
                for reward, share in explainable(model, seed, arguments.answers).items():
                    limits[reward].append(share)
    for earlier in arguments.earlier:
        add_earlier(found, earlier)
    write(found, limits, arguments.out)
    print(arguments.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(main())
