"""Load, run, stream and save models in layouts of four gloo ranks."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

LENGTHS = (13, 20, 31)


@dataclass(frozen=True)
class Case:
    """One model on one layout.

    Args:
        family: key of ``hf_families.CONFIGS``.
        layout: sizes of ``Layout`` other than the world.
        head: what the model ends in.
        source: folder to load instead of the family's.
        save: folder to save a Megatron checkpoint to.
        export: folder to save a Hugging Face folder to.
        slices: check the pieces that rollout ranks are sent; changes the model.
        apart: run each sequence by itself, too.
    """

    family: str
    layout: dict[str, int] = field(default_factory=dict)
    head: str = "policy"
    source: str | None = None
    save: str | None = None
    export: str | None = None
    slices: bool = False
    apart: bool = False


def sequences(vocab: int) -> list[torch.Tensor]:
    """The token sequences of every logit comparison."""
    random = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (length,), generator=random) for length in LENGTHS]


def worker(rank: int, world: int, cases: list[Case], folder: Path) -> None:
    """Run all cases; rank 0 writes results to ``results.pt``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.groups import GroupRegistry

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    registry, results = GroupRegistry(), []
    for case in cases:
        try:
            results.append(run_case(case, folder, registry, world))
        except Exception:
            (folder / f"failed-{rank}").write_text(f"{case}\n{traceback.format_exc()}")
            raise
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_case(case: Case, folder: Path, registry, world: int) -> dict[str, Any]:
    """Build the stages filled with NaN, load, and collect the values that the tests check."""
    from megatron.core import dist_checkpointing
    from served_slices import check_slices
    from transformers import AutoConfig

    from mppo.models.configuration import transformer_config
    from mppo.models.families.architectures import family_config
    from mppo.models.stage import build_stages
    from mppo.parallel.layout import Layout
    from mppo.recipe.sections.megatron import MegatronConfig
    from mppo.weights.blocks import padded_vocab_size
    from mppo.weights.save import save_hf
    from mppo.weights.stream import WeightStream
    from mppo.weights.torch_dist.checkpoint import load_weights

    layout = Layout(world=world, **case.layout)
    groups = registry.of(layout)
    here = groups.coordinates
    config = AutoConfig.from_pretrained(folder / case.family)
    family = family_config(config)
    megatron = transformer_config(family, MegatronConfig(), layout, torch.float32)
    source = Path(case.source) if case.source else folder / case.family
    vocab = padded_vocab_size(config.vocab_size, layout.tp)
    with groups.active():
        stages = build_stages(family, megatron, layout, vocab, here.pp, case.head)
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data.fill_(torch.nan)
    with groups.active():
        fresh = load_weights(source, stages, config, groups)
    stream = WeightStream(stages, config, groups, 40_000)
    for again in range(2):  # planned once: names and shapes are not sent again
        with pytest.MonkeyPatch.context() as missing:
            missing.delattr(dist, "all_gather_object")
            missing.delattr(dist, "broadcast_object_list")
            if again:  # the copies are planned once too; the tensors are the current ones
                missing.delattr("mppo.weights.stream.folded")
                for parameter in (p for stage in stages for p in stage.parameters()):
                    before, parameter.data = parameter.data, parameter.data.clone()
                    before.fill_(torch.nan)
            named = [pair for bucket in stream for pair in bucket]
        streamed = dict(named)
        assert len(named) == len(streamed), "a name came twice"
    if case.save:
        with groups.active():
            if dist.get_rank() == 0:
                Path(case.save).mkdir()
            dist.barrier()
            state = {f"model{n}": stage.sharded_state_dict() for n, stage in enumerate(stages)}
            dist_checkpointing.save(state, case.save)
    if case.export:
        save_hf(
            case.export, stages, config, groups, folder / case.family,
            bucket_bytes=40_000, max_shard_bytes=100_000,
        )  # fmt: skip
    logits = apart = None
    if case.head == "policy":
        packed = sequences(config.vocab_size)
        with torch.no_grad(), groups.active():
            logits = whole_logits(stages, layout, groups, config, packed)
            if case.apart:
                each = [whole_logits(stages, layout, groups, config, [one]) for one in packed]
                apart = torch.cat(each)
    if case.slices:
        check_slices(stages, config, layout, groups, folder)
    return {"streamed": streamed, "logits": logits, "apart": apart, "fresh": fresh}


def whole_logits(stages, layout, groups, config, packed: list[torch.Tensor]) -> torch.Tensor:
    """Logits ``[T, vocab]`` on every rank: chunks run in order and pass on hidden states."""
    from mppo.models.attention.packed_sequences import pack_sequences

    tokens = torch.cat(packed)
    packing = pack_sequences(torch.tensor([0, *map(len, packed)]).cumsum(0))
    hidden = None
    for virtual in range(layout.pp * layout.vpp):
        chunk, owner = divmod(virtual, layout.pp)
        if groups.coordinates.pp == owner:
            stages[chunk].set_input_tensor(hidden)
            hidden = stages[chunk].forward_packed(tokens, packing).contiguous()
        if layout.pp > 1:
            if hidden is None:
                hidden = torch.empty(len(tokens) // layout.tp, 1, config.hidden_size)
            source = dist.get_process_group_ranks(groups.pp)[owner]
            dist.broadcast(hidden, source, group=groups.pp)
    hidden = torch.cat(gathered(hidden, groups.tp, layout.tp))
    logits = torch.empty(len(tokens), config.vocab_size)
    if groups.is_last_stage:
        local = hidden[:, 0] @ stages[-1].output_weight().t()
        logits = torch.cat(gathered(local, groups.tp, layout.tp), -1)[:, : config.vocab_size]
        cap = stages[-1].final_logit_softcap
        logits = logits.contiguous() if cap is None else cap * torch.tanh(logits / cap)
    if layout.pp > 1:
        dist.broadcast(logits, dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    return logits


def gathered(tensor: torch.Tensor, group, size: int) -> list[torch.Tensor]:
    """The tensor of every rank of a group."""
    if size == 1:
        return [tensor]
    out = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(out, tensor.contiguous(), group=group)
    return out
