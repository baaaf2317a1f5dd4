"""Comparison of logits: the checkpoint on Megatron-Core, the folder on transformers."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoints_convert.job import Ranks
from mppo.hub.builtin import read_model_config
from mppo.models.attention.packed_sequences import pack_sequences
from mppo.models.configuration import transformer_config
from mppo.models.families.architectures import family_config
from mppo.models.families.family import FamilyConfig
from mppo.models.stage import Stage, build_stages
from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups
from mppo.parallel.launch import discover
from mppo.parallel.layout import Layout
from mppo.parallel.process_group import process_group
from mppo.recipe.sections.megatron import MegatronConfig
from mppo.weights.torch_dist.checkpoint import load_megatron

TOLERANCE, TESTED_LAYERS = 2e-6, 4
LENGTHS = (5, 17, 33)
TIMEOUT_S = 600.0


def compare_logits(hf: Path, megatron: Path, ranks: Ranks) -> tuple[bool, str]:
    """Load both in float32 on the CPU and compare logits of a few random sequences: whether they
    agree within ``allowed_difference`` of the largest logit, and a line for the user.

    Megatron's loader reads the checkpoint, so this also verifies that its keys are Megatron's.
    Loading is collective; only the first rank compares.
    """
    from mppo.models.transformers_model import load_model

    config = read_model_config(hf)
    family = family_config(config)
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(0, config.vocab_size, (length,), generator=generator) for length in LENGTHS
    ]
    group = process_group(discover({}), TIMEOUT_S) if ranks.world == 1 else nullcontext()
    with group, torch.no_grad():
        ours = megatron_logits(family, megatron, sequences)
    if ranks.rank > 0:
        return True, ""
    model = load_model(hf)
    with torch.no_grad():
        theirs = torch.cat([model(sequence[None]).logits[0] for sequence in sequences])
    largest = float((ours - theirs).abs().max())
    relative = largest / float(theirs.abs().max())
    allowed = allowed_difference(config.num_hidden_layers)
    verdict = "equal" if relative <= allowed else "DIFFERENT"
    return relative <= allowed, (
        f"logits {verdict}: largest difference {largest:.2e}, {relative:.1e} of the largest logit "
        f"({allowed:.1e} allowed at {config.num_hidden_layers} layers) over {sum(LENGTHS)} tokens"
    )


def allowed_difference(layers: int) -> float:
    """Largest difference, relative to the largest logit, that float32 rounding may cause.

    Every family of the tests stays below 2e-6 at 4 layers. Each layer adds rounding errors to the
    residual stream; as they are independent, they grow with the square root of the depth. A wrong
    weight, a permuted head or another rotary base exceeds this by orders of magnitude.
    """
    return TOLERANCE * max(1.0, math.sqrt(layers / TESTED_LAYERS))


def megatron_logits(family: FamilyConfig, megatron: Path, sequences: list[Tensor]) -> Tensor:
    """Logits ``[T, vocab]`` of a checkpoint, float32; every process computes all of them."""
    device.prepare_megatron()
    layout = Layout(world=dist.get_world_size())
    groups = LayoutGroups(layout)
    vocab = family.gpt_kwargs["vocab_size"]
    config = transformer_config(family, MegatronConfig(), layout, torch.float32)
    with groups.active():
        stages = build_stages(family, config, layout, vocab, 0, "policy")
        load_megatron(megatron, stages, vocab)
        return stage_logits(stages[0], sequences)[:, :vocab].cpu()


def stage_logits(stage: Stage, sequences: list[Tensor]) -> Tensor:
    """Logits ``[T, vocab]`` of a model that is a single stage."""
    cu_seqlens = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0)
    (tokens_T,) = device.copied([torch.cat(sequences)])
    hidden = stage.forward_packed(tokens_T, pack_sequences(cu_seqlens).on_device())
    logits = hidden[:, 0] @ stage.output_weight().t()
    cap = stage.final_logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)
