"""One training step of a tiny model in a layout, in separate gloo processes."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks

from mppo.algos.token_axis import select_sequences
from mppo.batch.batch import Batch
from mppo.batch.episode import NO_WEIGHTS, Episode, EpisodeTokens
from mppo.batch.head_outputs import tensors_of
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt

VOCABULARY = 101


@dataclass(frozen=True)
class Case:
    """A case to run.

    Args:
        model: key of ``tiny_models.CONFIGS``.
        megatron: the role's section of the recipe.
        head: "policy" or "value".
        micro_batch: sequences per micro-batch; ``run_matrix`` varies it, but keeps 1.
        steps: optimizer steps taken.
        role: further fields of ``RoleConfig``.
        source: folder or checkpoint to start from instead of the model's own.
        dtype: of the parameters.
        beside: a second role in the same processes; both take turns, pass by pass.
        chunk: positions whose logits exist at one time.
        token_budget: tokens per micro-batch, instead of sequences.
    """

    model: str
    megatron: dict[str, Any] = field(default_factory=dict)
    head: str = "policy"
    micro_batch: int = 4
    steps: int = 2
    role: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    dtype: str = "float32"
    beside: Case | None = None
    chunk: int = 7
    token_budget: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Outputs of the forward pass ``[T]``, one loss and norm per step, routing metrics, weights
    before and after; the same of the role beside."""

    outputs: tuple[torch.Tensor, ...]
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    stats: list[dict[str, float]]
    routing: dict[str, float]
    initial: dict[str, torch.Tensor]
    beside: Outcome | None = None


def batch_of(sequences: int = 7, longest: int = 11) -> Batch:
    """Episodes of many lengths, one of them without a response, and one a conversation."""
    random = torch.Generator().manual_seed(3)

    def tokens(low: int) -> list[int]:
        count = int(torch.randint(low, longest, (), generator=random))
        return torch.randint(0, VOCABULARY, (count,), generator=random).tolist()

    episodes = []
    for uid in range(sequences):
        prompt, response = tokens(1), tokens(1) if uid != 2 else []
        known = Prompt(uid, prompt, "", "", ""), EpisodeTokens(response, [0.0] * len(response))
        # the environment's tokens of a conversation are in the middle, and have no loss
        earlier = (
            ((0, 1), (NO_WEIGHTS, len(response) - 2)) if uid == 4 and len(response) > 2 else ()
        )
        episodes.append(Episode.sampled(*known, "stop", 0, earlier))
    return pack_episodes(episodes)


def engine_choices(tokens: int, layers: int, experts: int, chosen: int) -> torch.Tensor:
    """Random experts for every token, as an engine returns them: int16 ``[T, layers, chosen]``."""
    random = torch.Generator().manual_seed(4)
    order = torch.rand(tokens, layers, experts, generator=random).argsort(-1)
    return order[..., :chosen].to(torch.int16)


def objective(batch: Batch):
    """A loss with a different weight for every response token."""
    weights_T = torch.sin(torch.arange(len(batch.tokens_T)).float()) * batch.response_mask_T
    weights_T /= batch.response_mask_T.sum()

    def loss(outputs, indices):
        chosen = select_sequences(weights_T, batch.cu_seqlens, list(indices))
        tensors = tensors_of(outputs)
        chosen = chosen.to(tensors[0].device)
        total = (chosen * tensors[0]).sum() + 0.1 * (chosen * tensors[-1].square()).sum()
        return total, {"loss": total.detach()}

    loss.statistics = ("loss",)
    return loss


def starting_from(before: tuple[torch.Tensor, ...], batch: Batch, loss_of):
    """``loss_of``, asserting that training gives the forward pass's outputs: a ratio of 1."""

    def loss(outputs, indices):
        # in training a histogram of values has its logits, too
        for output, complete in zip(tensors_of(outputs), before):
            expected = select_sequences(complete, batch.cu_seqlens, list(indices))
            found = output.detach().float().cpu()
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        return loss_of(outputs, indices)

    loss.statistics = loss_of.statistics
    return loss


def build_role(case: Case, folder: Path, registry):
    """The role of a case on the running process group."""
    from mppo.hub.builtin import read_model_config
    from mppo.models.role import Role
    from mppo.recipe.sections.megatron import MegatronConfig
    from mppo.recipe.sections.optim import OptimConfig
    from mppo.recipe.sections.role_config import RoleConfig
    from mppo.recipe.sections.roles import BatchingConfig

    megatron = MegatronConfig(**case.megatron)
    batching = BatchingConfig(
        ppo_micro_batch_size_per_gpu=case.micro_batch, head_chunk_tokens=case.chunk
    )
    if case.token_budget is not None:
        budget = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": case.token_budget}
        batching = batching.model_copy(update=budget)
    settings = RoleConfig(
        name="actor" if case.head == "policy" else "critic",
        batching=batching,
        megatron=megatron,
        dtype=case.dtype,
        temperature=0.9,
        optim=OptimConfig(lr=0.05, eps=0.01, weight_decay=0.0),
        **case.role,
    )
    source = Path(case.source) if case.source else folder / case.model
    groups = registry.of(megatron.layout(dist.get_world_size()))
    return Role(settings, source, read_model_config(source), groups, total_steps=10)


def run_case(case: Case, folder: Path, registry) -> Outcome:
    """Measure, then train on one mini-batch ``case.steps`` times."""
    if case.beside is None:
        *_, outcome = _passes(case, folder, registry)
        return outcome
    roles = [_passes(one, folder, registry) for one in (case, case.beside)]
    *_, (outcome, other) = zip(*roles, strict=True)
    return replace(outcome, beside=other)


def _passes(case: Case, folder: Path, registry) -> Iterator[Outcome | None]:
    """A role's passes over the batch and their outputs; yields None after each."""
    from mppo.batch.mini_batch import MiniBatch
    from mppo.batch.shares import share_out
    from mppo.models.streamed_role import forward

    batch = batch_of()
    role = build_role(case, folder, registry)
    if role.settings.router_replay == "R3":
        sizes = role.config.num_layers, role.config.num_moe_experts, role.config.moe_router_topk
        batch = replace(batch, routed_experts_T=engine_choices(len(batch.tokens_T), *sizes))
    home = share_out(batch, role.config.num_moe_experts)
    plan = role.plan(home, training=False)
    share, _ = role.fetch(home, plan)
    outputs = tuple(everywhere(x_T, home) for x_T in tensors_of(forward(role, share, plan)))
    yield None
    initial = _weights(role)
    plan = role.plan(home, training=True)
    role.optimizer.advance()
    stats, norms, loss_of = [], [], objective(batch)
    first = starting_from(outputs, batch, loss_of) if case.dtype == "float32" else loss_of
    for step in range(case.steps):
        losses = loss_of if step else first
        mini_batch = MiniBatch(role.fetch(home, plan)[0], plan, losses)
        statistics, result = train_step(role, mini_batch)
        stats.append(statistics)
        norms.append(result.grad_norm)
        yield None
    losses = [s["loss"] for s in stats]
    metrics = role.routing_metrics()
    yield Outcome(outputs, losses, norms, _weights(role), stats, metrics, initial)


def train_step(role, mini_batch):
    """Statistics of a mini-batch, and the result of the optimizer step that it gives."""
    from mppo.models.role import step_together
    from mppo.models.streamed_role import forward_backward

    statistics = forward_backward(role, mini_batch)
    return statistics, step_together([role])[role.name]


def everywhere(x_T: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A tensor of the tokens at home on each rank, of all tokens on every rank."""
    from mppo.parallel.exchange import Moves, exchange

    if batch.is_replicated:
        return x_T
    numbers = list(range(batch.num_sequences))
    moves = Moves(batch.home_B.tolist(), [numbers] * dist.get_world_size())
    held = batch.at_home(dist.get_rank()).tolist()
    return exchange(moves, batch.lengths_B.tolist(), held, lambda _: [x_T])[0]


def _weights(role) -> dict[str, torch.Tensor]:
    """The role's weights under their Hugging Face names."""
    return {
        name: tensor.clone() for bucket in role.weights.stream(1 << 16) for name, tensor in bucket
    }


def compare(here: Outcome, there: Outcome) -> None:
    """Assert that two runs computed, lost, routed and learned the same."""
    for mine, other in zip(here.outputs, there.outputs, strict=True):
        torch.testing.assert_close(mine, other, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(here.losses, there.losses, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(here.norms[:1], there.norms[:1], atol=5e-6, rtol=1e-5)
    # after a step of Adam, which divides also the smallest gradients by their own size
    torch.testing.assert_close(here.norms[1:], there.norms[1:], atol=5e-6, rtol=5e-5)
    assert here.weights.keys() == there.weights.keys()
    for name, weight in there.weights.items():
        torch.testing.assert_close(
            here.weights[name], weight, atol=5e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert here.routing == pytest.approx(there.routing, abs=1e-5)
    if there.beside is not None:
        compare(here.beside, there.beside)


def _worker(rank: int, world: int, cases: Sequence[Case], folder: Path, run=None) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.groups import GroupRegistry

    store = folder / f"store{world}"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    registry, outcomes = GroupRegistry(), []
    for case in cases:
        try:
            outcomes.append((run or run_case)(case, folder, registry))
        except Exception:
            (folder / f"failed{world}-{rank}").write_text(f"{case}\n{traceback.format_exc()}")
            raise
    if rank == 0:
        torch.save(outcomes, folder / f"outcomes{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_cases(cases: Sequence[Case], world: int, folder: Path, run=None) -> list[Any]:
    """Run all cases in one process group of ``world`` ranks, one after the other.

    Args:
        cases: the cases; their models are made under ``folder``.
        world: number of processes.
        folder: a fresh folder.
        run: instead of ``run_case``: a function of the same arguments, its result from rank 0.

    Returns:
        One outcome per case.
    """
    from tiny_models import save

    besides = [case.beside for case in cases if case.beside is not None]
    for model in sorted({case.model for case in [*cases, *besides]}):
        if not (folder / model).exists():
            save(model, folder / model)
    start_ranks(_worker, (world, cases, folder, run), world)
    return torch.load(folder / f"outcomes{world}.pt", weights_only=False)


Pair = tuple[str, str]


def run_matrix(
    references: dict[str, Case],
    layouts: dict[str, dict[str, Any]],
    chosen: dict[str, Sequence[str]],
    folder: Path,
) -> tuple[dict[str, Outcome], dict[Pair, Outcome]]:
    """References in one process, and each on the layouts chosen for it on four ranks.

    Args:
        references: what is compared with, by name.
        layouts: sections of the recipe by name; micro-batches get other sizes, too, save where the
            reference has one sequence in each.
        chosen: names of layouts for every reference.
        folder: a fresh folder.

    Returns:
        Outcomes by reference, and by (reference, layout).
    """
    pairs = pairs_of(chosen)
    alone = dict(zip(references, run_cases(list(references.values()), 1, folder)))
    cases = [
        replace(
            references[name],
            megatron=references[name].megatron | layouts[layout],
            micro_batch=1 if references[name].micro_batch == 1 else 1 + index % 4,
        )
        for index, (name, layout) in enumerate(pairs)
    ]
    return alone, dict(zip(pairs, run_cases(cases, 4, folder)))


def pairs_of(chosen: dict[str, Sequence[str]]) -> list[Pair]:
    """Every reference with every layout chosen for it."""
    return [(name, layout) for name, layouts in chosen.items() for layout in layouts]
