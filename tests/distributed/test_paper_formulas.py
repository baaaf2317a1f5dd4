"""From episodes to gradients in every layout, against the papers' formulas.

The episodes have gaps (tools' answers), several segments, and ends that a limit cut off. The oracle
reads the papers' formulas token by token in float64, and takes transformers' gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_case import VOCABULARY, Case, build_role, everywhere, run_cases
from transformers import AutoModelForCausalLM

from mppo.batch.batch import Batch
from mppo.batch.episode import NO_WEIGHTS, Episode, EpisodeTokens, with_scores
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.recipe.presets import apply_preset
from mppo.recipe.schema import Recipe
from mppo.trainer.value_gate import MEASURES

TEMPERATURE = 0.9
"""Of ``build_role``."""
BINS, LOW, HIGH, SIGMA_RATIO = 7, -3.0, 3.0, 0.75
HISTOGRAM = {"bins": BINS, "min": LOW, "max": HIGH, "sigma_ratio": SIGMA_RATIO}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2, "use_distributed_optimizer": False}),
    "DP3": (3, {"use_distributed_optimizer": False}),
}
"""With a sharded optimizer a rank has the complete gradient of its shard only."""
MIS_PO = {
    "rollout_is": "token", "rollout_is_mode": "indicator", "rollout_is_lower": 0.5,
    "rollout_is_threshold": 2.0, "rollout_rs": "geometric",
    "rollout_rs_threshold_lower": 1 / 1.001, "rollout_rs_threshold": 1 / 0.996,
}  # fmt: skip
SEQ_MASK_TIS = {
    "rollout_is": "token", "rollout_is_threshold": 1e9, "rollout_rs": "geometric",
    "rollout_rs_threshold_lower": 1 / 1.002, "rollout_rs_threshold": 1 / 0.999,
}  # fmt: skip
ICEPOP = {
    "rollout_is": "token", "rollout_is_mode": "mask", "rollout_is_lower": 0.5,
    "rollout_is_threshold": 5.0,
}  # fmt: skip
DECOUPLED = {"rollout_is": "token", "rollout_is_threshold": 2.0}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "SAO": {"algorithm": {"preset": "sao"}},
    "VAPO, IcePop": {
        "algorithm": {"preset": "vapo", "rollout_correction": ICEPOP},
        "critic": {"value_loss": "hl_gauss", "hl_gauss": HISTOGRAM},
    },
    "CompactionRL, decoupled": {
        "algorithm": {"preset": "compaction_rl", "gamma": 0.98, "rollout_correction": DECOUPLED},
    },
    "Turn-PPO, seq-mask-tis": {
        "algorithm": {"preset": "turn_ppo", "rollout_correction": SEQ_MASK_TIS},
    },
    "MIS-PO, bootstrap": {
        "algorithm": {"bootstrap_truncated": True, "rollout_correction": MIS_PO},
    },
}
PARTS = [
    [((0, 3), (NO_WEIGHTS, 2), (1, 4))],
    [((0, 5),)],
    [((1, 2), (NO_WEIGHTS, 1), (1, 1)), ((2, 3),), ((2, 4),)],
    [((0, 6),)],
    [((2, 1), (NO_WEIGHTS, 3), (2, 2), (NO_WEIGHTS, 1), (2, 3))],
    [((0, 9),), ((1, 1),)],
    [()],
]
"""Of each episode its segments, whose parts are a policy's tokens or an environment's."""
ENDS = ("stop", "length", "stop", "length", "stop", "length", "abort")
GAPS = (0.0, 0.0, 0.0, 0.0005, 0.0, -0.0015, 0.01, 0.0, -0.003, 0.0)
"""Mean of log pi_old - log pi_engine of each segment, near the bounds of the sequences' masks."""
OLD, OLD_VALUES = 0.25, 0.4
"""Deviation of the old policy and values from the current ones."""


def batch_of(bootstraps: bool, logprobs_T: torch.Tensor | None = None) -> Batch:
    """The episodes; ``logprobs_T`` are the old policy's, and the engine's differ from them."""
    random = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=random).tolist()

    episodes, number = [], 0
    for uid, segments in enumerate(PARTS):
        made = []
        for parts in segments:
            prompt, count = Prompt(uid, tokens(2 + uid % 3), "", "", ""), sum(n for _, n in parts)
            here = EpisodeTokens(tokens(count), [-1.0] * count)
            reason = ENDS[uid] if len(made) == len(segments) - 1 else "stop"
            version = parts[-1][0] if parts else 0
            made.append(Episode.sampled(prompt, here, reason, version, parts[:-1]))
            number += 1
        *earlier, last = made
        episodes.append(replace(last, earlier=tuple(earlier)))
    scores = torch.randn(len(PARTS), generator=random).tolist()
    batch = pack_episodes(
        with_scores(episodes, list(map(ResponseScore, scores))), bootstraps=bootstraps
    )
    assert number == len(GAPS) == batch.num_sequences
    if logprobs_T is None:
        return batch
    engine_T = torch.zeros_like(logprobs_T)
    for mine, gap in zip(trained(batch), GAPS, strict=True):
        if mine:
            by = 0.6 * torch.randn(len(mine), generator=random)
            by[0] += 2.0 * (len(mine) > 4)
            engine_T[mine] = logprobs_T[mine] - (by - by.mean() + gap)
    return replace(batch, rollout_logprobs_T=engine_T)


def trained(batch: Batch) -> list[list[int]]:
    """The policy's tokens of each sequence."""
    mask_T = batch.response_mask_T
    spans = pairwise(batch.cu_seqlens.tolist())
    return [[t for t in range(a, b) if mask_T[t] > 0] for a, b in spans]


def noise(count: int, size: float) -> torch.Tensor:
    return size * torch.randn(count, generator=torch.Generator().manual_seed(1))


def recipe_of(name: str) -> Recipe:
    """The sections that matter of a recipe."""
    return Recipe.model_validate(apply_preset(RECIPES[name]))


def measure(case: Case, folder: Path, registry) -> list[dict[str, Any]]:
    """Experience, losses and gradients of every recipe in a layout."""
    from mppo.batch.gathers import gather_of_mini_batch
    from mppo.batch.outputs import Outputs
    from mppo.batch.shares import share_out
    from mppo.models.streamed_role import forward
    from mppo.trainer.advantages import estimate
    from mppo.trainer.metrics import experience_metrics
    from mppo.trainer.targets import policy_targets, value_targets
    from mppo.trainer.update.objectives import PolicyObjective, ValueObjective

    found = []
    actor = build_role(case, folder, registry)
    for recipe in map(recipe_of, RECIPES):
        of_critic = {
            "histogram": recipe.critic.histogram, "freeze": recipe.critic.freeze,
            "bootstraps": True,
        }  # fmt: skip
        critic = build_role(replace(case, head="value", role=of_critic), folder, registry)
        bootstraps = recipe.algorithm.bootstrap_truncated
        home = share_out(batch_of(bootstraps, torch.load(folder / f"old{int(bootstraps)}.pt")))
        outputs = {}
        for role in (actor, critic):
            plan = role.plan(home, training=False)
            share, inputs = role.fetch(home, plan)
            inputs = replace(inputs, with_squares=role is actor)
            outputs[role.name] = forward(role, share, plan, inputs)
        policy, values_T = outputs["actor"], outputs["critic"].values_T
        tokens = int(home.lengths_B.sum())
        where = [t for i in home.held_H.tolist() for t in spans_of(home)[i]]
        inside_T = home.response_mask_T
        old = Outputs(
            home,
            policy.logprobs_T + noise(tokens, OLD)[where] * inside_T,
            policy.logprobs_T,
            values_T + noise(tokens, OLD_VALUES)[where] * home.value_mask_T,
        )
        experience = estimate(old, recipe.algorithm, 0.0)
        indices = tuple(range(home.num_sequences))

        def gather(chosen, home=home):
            return gather_of_mini_batch(home, chosen)

        objectives = {
            actor: lambda fetched, mine, recipe=recipe: PolicyObjective(
                fetched, mine, recipe.actor, recipe.algorithm.rollout_correction
            ),
            critic: lambda fetched, mine, recipe=recipe: ValueObjective(
                fetched, mine, recipe.critic
            ),
        }
        targets = {
            actor: policy_targets(experience, indices, recipe.actor, 9, 0, gather),
            critic: value_targets(
                experience, indices, recipe.critic, 9, gather, recipe.algorithm.gae_unit
            ),
        }
        one = complete(policy, values_T, old, experience)
        metrics = experience_metrics(experience, recipe.algorithm.gae_unit)
        one["explained"] = [metrics[name] for name in MEASURES]
        for role in (actor, critic):
            one[role.name] = trained_once(role, home, targets[role], objectives[role])
        found.append(one)
    return found


def complete(policy: Any, values_T: torch.Tensor, old: Any, experience: Any) -> dict[str, Any]:
    """The numbers of every token of the batch, from all ranks."""
    found = {
        "logprobs": policy.logprobs_T, "values": values_T, "squares": policy.squares_T,
        "old": old.logprobs_T, "old_values": old.values_T,
        "advantages": experience.advantages_T, "returns": experience.returns_T,
        "weight": experience.loss_weight_T,
    }  # fmt: skip
    return {name: everywhere(x_T, old.batch) for name, x_T in found.items()}


def spans_of(batch: Batch) -> list[range]:
    """The tokens of each sequence of the complete batch."""
    ends = [0, *batch.lengths_B.cumsum(0).tolist()]
    return [range(a, b) for a, b in pairwise(ends)]


def trained_once(role, home: Batch, targets, objective_of) -> dict[str, Any]:
    """Statistics of a mini-batch of everything, weights and gradients by Hugging Face names."""
    from layout_case import _weights

    from mppo.batch.mini_batch import MiniBatch
    from mppo.models.streamed_role import forward_backward
    from mppo.trainer.targets import fetch_targets

    plan = role.plan(home, training=True)
    held = home.held_H.tolist()
    objective = objective_of(*fetch_targets(targets, held, home, plan, role.layout))
    role.optimizer.advance()
    statistics = forward_backward(role, MiniBatch(role.fetch(home, plan)[0], plan, objective))
    weights = _weights(role)
    parameters = [p for chunk in role.chunks for p in chunk.parameters() if p.requires_grad]
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        gradients = _weights(role)
        for parameter, value in zip(parameters, kept):
            parameter.copy_(value)
    return {"statistics": statistics, "weights": weights, "gradients": gradients}


def hidden_states(model, batch: Batch) -> torch.Tensor:
    """Transformers' hidden states before each token: ``[T, hidden]``."""
    model.zero_grad()
    rows = []
    for a, b in pairwise(batch.cu_seqlens.tolist()):
        states = model.model(batch.tokens_T[None, a:b]).last_hidden_state[0]
        rows += [torch.zeros_like(states[:1]), states[:-1]]
    return torch.cat(rows)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    from tiny_models import save

    folder = tmp_path_factory.mktemp("formulas")
    save("qwen2", folder / "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen2", attn_implementation="eager")
    model = model.double()
    for bootstraps in (False, True):
        batch = batch_of(bootstraps)
        with torch.no_grad():
            logits = model.lm_head(hidden_states(model, batch)) / TEMPERATURE
            logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, batch.tokens_T[:, None])[:, 0]
        old_T = (chosen + noise(len(chosen), OLD)) * batch.response_mask_T
        torch.save(old_T.float(), folder / f"old{int(bootstraps)}.pt")
    found = {}
    for world in (2, 3):
        names = [name for name, (ranks, _) in LAYOUTS.items() if ranks == world]
        cases = [Case("qwen2", LAYOUTS[name][1], micro_batch=3) for name in names]
        found |= dict(zip(names, run_cases(cases, world, folder, run=measure)))
    return folder, model, found


def ratios_of(new, other) -> list[float]:
    return [math.exp(float(a) - float(b)) for a, b in zip(new, other)]


def geometric(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def advantages_of_paper(name: str, batch: Batch, values: list[float]):
    """GAE by each paper's definition: advantages before whitening and returns, by token."""
    gamma = {"CompactionRL, decoupled": 0.98, "Turn-PPO, seq-mask-tis": 0.99}.get(name, 1.0)
    alpha = {"SAO": 1.5, "VAPO, IcePop": 0.05, "CompactionRL, decoupled": 1.5}.get(name)
    by_turn, bootstraps = name.startswith("Turn-PPO"), name.startswith("MIS-PO")
    advantages, returns = [0.0] * len(values), [0.0] * len(values)
    own = trained(batch)
    for number, tokens in enumerate(own):
        if not tokens:
            continue
        # 1 - 1 / (alpha l), at least 0; else the preset's lambda
        plain = 0.9 if by_turn else 1.0
        lam = plain if alpha is None else max(0.0, 1 - 1 / max(alpha * len(tokens), 1.0))
        lam_value = 1.0 if name in ("SAO", "VAPO, IcePop") else lam
        later_segments = [
            i for i in range(number + 1, len(own)) if batch.episode_B[i] == batch.episode_B[number]
        ]
        after = sum(len(own[i]) for i in later_segments)
        credit = (gamma * lam) ** after if name.startswith("CompactionRL") else 1.0
        # a step is a token, or a run of tokens without a tool's answer between them
        steps = [[t] for t in tokens]
        if by_turn:
            starts = [t for t in tokens if t - 1 not in tokens]
            steps = [[t for t in tokens if a <= t < b]
                     for a, b in pairwise([*starts, tokens[-1] + 1])]  # fmt: skip
        cut = bootstraps and bool(batch.truncated_B[number]) and not later_segments
        following = values[tokens[-1] + 1] if cut and batch.end_mask_T[tokens[-1] + 1] else 0.0
        reward = 0.0 if following else float(batch.scores_B[number])
        ahead = ahead_value = 0.0
        for step in reversed(steps):
            value = values[step[0]]
            delta = reward + gamma * following - value
            ahead = delta + gamma * lam * ahead
            ahead_value = delta + gamma * lam_value * ahead_value
            following, reward = value, 0.0
            for t in step:
                advantages[t] = credit * ahead
            returns[step[0]] = ahead_value + value
    return advantages, returns


def weights_of_paper(name: str, old: torch.Tensor, batch: Batch) -> list[float]:
    """Weight of each token by its ratio of the old policy to the engine; 0: it is left out."""
    found = [0.0] * len(old)
    for tokens in filter(None, trained(batch)):
        ratios = ratios_of(old[tokens], batch.rollout_logprobs_T[tokens])
        mean = geometric(ratios)
        for t, ratio in zip(tokens, ratios):
            found[t] = {
                "SAO": 1.0,
                "VAPO, IcePop": ratio if 0.5 <= ratio <= 5 else 0.0,
                "CompactionRL, decoupled": min(ratio, 2.0),
                "Turn-PPO, seq-mask-tis": ratio if 0.999 <= mean <= 1.002 else 0.0,
                "MIS-PO, bootstrap": float(0.5 <= ratio <= 2 and 0.996 <= mean <= 1.001),
            }[name]
    return found


def policy_loss_of_paper(name: str, one, batch: Batch, logprobs: torch.Tensor) -> torch.Tensor:
    """The policy's loss, a mean over the tokens that are trained."""
    kept = [t for t, weight in enumerate(one["weight"].tolist()) if weight]
    old = batch.rollout_logprobs_T if name == "SAO" else one["old"]
    ratio = (logprobs[kept] - old[kept].double()).exp()
    advantage, weight = one["advantages"][kept].double(), one["weight"][kept].double()
    if name == "SAO":  # f(r) = r within (1 - .3, 1 + 5), else 0: L = E[f(r) A log pi]
        f = torch.tensor([r if 0.7 < r < 6.0 else 0.0 for r in ratio.tolist()])
        return -(f.double() * advantage * logprobs[kept]).mean()
    high = 1.28 if name.startswith("VAPO") else 1.2
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, high) * advantage)
    dual = torch.where(advantage < 0, torch.maximum(clipped, 3.0 * advantage), clipped)
    loss = -(weight * dual).mean()
    if name.startswith("VAPO"):
        of_token = batch.scores_B.repeat_interleave(batch.lengths_B)
        positive = [t for t in kept if of_token[t] > 0]
        loss = loss - 0.1 * logprobs[positive].mean()
    return loss


def value_loss_of_paper(name: str, one, states: list[int], outputs: torch.Tensor) -> torch.Tensor:
    """PPO's clipped squared error, or HL-Gauss's cross-entropy; a mean over the states."""
    returns = one["returns"][states].double()
    if name.startswith("VAPO"):
        width = (HIGH - LOW) / BINS
        edges = torch.tensor([LOW + k * width for k in range(BINS + 1)]).double()
        normal = torch.distributions.Normal(returns.clamp(LOW, HIGH), SIGMA_RATIO * width)
        below = torch.stack([normal.cdf(edge) for edge in edges])
        target = (below[1:] - below[:-1]) / (below[-1] - below[0])
        return -(target.T * outputs[states].log_softmax(-1)).sum(-1).mean()
    values, before = outputs[states, 0], one["old_values"][states].double()
    near = torch.minimum(torch.maximum(values, before - 0.5), before + 0.5)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()


def explained_of_paper(one, batch: Batch, states: list[int]) -> list[float]:
    """1 - Var[R - V] / Var[R] with one weight for each state, and with one for each episode."""
    owner_T = batch.episode_B.repeat_interleave(batch.lengths_B).tolist()
    counts = Counter(owner_T[t] for t in states)
    found = []
    for weight in ({t: 1.0 for t in states}, {t: 1 / counts[owner_T[t]] for t in states}):
        total = sum(weight.values())

        def variance(x: torch.Tensor, weight=weight, total=total) -> float:
            mean = sum(w * float(x[t]) for t, w in weight.items()) / total
            return sum(w * (float(x[t]) - mean) ** 2 for t, w in weight.items()) / (total - 1)

        returns = one["returns"].double()
        errors = returns - one["old_values"].double()
        found.append(1 - variance(errors) / (variance(returns) + 1e-5))
    return found


def compare(found, expected, what: str) -> None:
    """Equal to 2e-6, of the largest number where that is above 1: float32's sums differ by
    processor, by 1.03e-6 on one."""
    expected = torch.as_tensor(expected).double()
    size = max(1.0, float(expected.abs().max()))
    error = float((torch.as_tensor(found).double() - expected).abs().max()) / size
    assert error <= 2e-6, f"{what}: {error:.1e}"


def compare_gradients(got, model, head: torch.Tensor, loss: torch.Tensor, name: str) -> None:
    """Gradients by Hugging Face names; a frozen parameter has none."""
    loss.backward()
    named = {**dict(model.named_parameters()), name: head}
    checked = 0
    for key, gradient in got["gradients"].items():
        if not torch.equal(gradient, got["weights"][key]):
            compare(gradient, named[key].grad, key)
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experience_losses_and_gradients_are_the_papers(launched, layout, name):
    folder, model, found = launched
    one = found[layout][list(RECIPES).index(name)]
    bootstraps = int(name.startswith("MIS-PO"))
    batch = batch_of(bool(bootstraps), torch.load(folder / f"old{bootstraps}.pt"))
    inside = [t for tokens in trained(batch) for t in tokens]

    advantages, returns = advantages_of_paper(name, batch, one["old_values"].tolist())
    mean = sum(advantages[t] for t in inside) / len(inside)
    variance = sum((advantages[t] - mean) ** 2 for t in inside) / (len(inside) - 1)
    for t in inside:
        advantages[t] = (advantages[t] - mean) / math.sqrt(variance + 1e-8)
    compare(one["advantages"], advantages, "advantages")
    states = [t for t, x in enumerate(returns) if x]
    compare(one["returns"][states], [returns[t] for t in states], "returns")
    compare(one["explained"], explained_of_paper(one, batch, states), "explained variance")
    weights = weights_of_paper(name, one["old"], batch)
    compare(one["weight"], weights, "weights")
    left_out = sum(not weights[t] for t in inside)
    assert (left_out > 0) == (name not in ("SAO", "CompactionRL, decoupled")), left_out

    logits = model.lm_head(hidden_states(model, batch)) / TEMPERATURE
    every = logits.log_softmax(-1)
    logprobs = every.gather(1, batch.tokens_T[:, None])[:, 0]
    compare(one["logprobs"][inside], logprobs[inside].detach(), "log-probabilities")
    squares = every.exp().square().sum(-1)
    compare(one["squares"][inside], squares[inside].detach(), "squares")
    loss = policy_loss_of_paper(name, one, batch, logprobs)
    statistics = one["actor"]["statistics"]
    if name == "SAO":
        assert min(statistics["actor/masked_below"], statistics["actor/masked_above"]) > 0
    ours = statistics["actor/pg_loss"] + 0.1 * statistics.get("actor/positive_nll", 0.0)
    compare(ours, loss.detach(), "policy loss")
    compare_gradients(one["actor"], model, model.lm_head.weight, loss, "lm_head.weight")

    hidden = hidden_states(model, batch)
    head = one["critic"]["weights"]["score.weight"].double().requires_grad_()
    outputs = hidden @ head.T
    values = outputs[:, 0]
    if name.startswith("VAPO"):
        centres = torch.tensor([LOW + (k + 0.5) * (HIGH - LOW) / BINS for k in range(BINS)])
        values = (outputs.softmax(-1) * centres.double()).sum(-1)
    compare(one["values"][inside], values[inside].detach(), "values")
    learnt = [t for t in states if weights[t]]
    loss = value_loss_of_paper(name, one, learnt, outputs)
    compare(one["critic"]["statistics"]["critic/vf_loss"], loss.detach(), "value loss")
    compare_gradients(one["critic"], model, head, loss, "score.weight")
