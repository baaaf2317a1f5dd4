"""Stand-ins for data that a single simulated rank does not have.

These are the files of weights, the parameters of other pipeline stages, the shapes of their
messages, and the routers' expert choices, which depend on numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mppo.config.rules.rule import RoleCase
from mppo.models import role, role_weights
from mppo.models.attention import core
from mppo.models.moe import router
from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.layout import Layout
from mppo.planning.memory import role_stage_layers
from mppo.simulation.gpu import attention_kernels, collectives, norm_kernel
from mppo.simulation.gpu.counters import Counters
from mppo.simulation.gpu.known_values import attach_values, forget
from mppo.supervision.phase import current
from mppo.trainer import roles
from mppo.weights import stream
from mppo.weights.hf.folder import HFFolder
from mppo.weights.hf.safetensors_file import StoredTensor
from mppo.weights.load import load_hf_weights
from mppo.weights.shape import model_shape
from mppo.weights.table import parameter_table


class EmptyFolder(HFFolder):
    """A Hugging Face folder without files: every tensor of the model is zero.

    Args:
        hf_config: the model's config.
    """

    def __init__(self, hf_config: Any) -> None:
        self.path = Path("no weights")
        shapes = parameter_table(model_shape(hf_config)).hf_shapes()
        self.tensors = {
            name: StoredTensor(self.path, 0, torch.bfloat16, shape)
            for name, shape in shapes.items()
        }
        self.bytes_read = 0
        self._scales = {}

    def read_into(self, target: Tensor, name: str, dim: int = 0, start: int = 0) -> None:
        """Copy zeros from the host to ``target``, like a slice of a file."""
        target.copy_(torch.zeros((), dtype=target.dtype).expand(target.shape))


def install(
    cases: Mapping[str, tuple[RoleCase, Any]], world_size: int, counters: Counters, uneven: bool
) -> None:
    """Replace the functions that need this data by stand-ins.

    Args:
        cases: recipe section and Hugging Face config of each role, by name.
        world_size: number of ranks.
        counters: counters of the rank, which also count micro-batches.
        uneven: routers send a quarter of the experts nothing.
    """

    def load_weights(path: Any, chunks: Any, hf_config: Any, groups: Any) -> tuple[str, ...]:
        folder: Any = EmptyFolder(hf_config)
        return load_hf_weights(folder, chunks, hf_config, groups.layout, groups.coordinates).fresh

    role_weights.load_weights = load_weights
    roles.resolve_model = lambda path, seed=0: Path(path)
    case, hf_config = cases["actor"]
    everyone = stage_holdings(case, hf_config, world_size)

    def of_all_stages(held: list[tuple], size: int, group: Any = None) -> list[list[tuple]]:
        all_gather_objects(held, size, group)
        return [held] if size == 1 else everyone

    replaced: Any = stream
    replaced.all_gather_objects = of_all_stages
    router.Router._choose = _fixed_choice(router.Router._choose, 0.75 if uneven else 1.0)
    _follow_micro_batches(counters, {name: config for name, (_, config) in cases.items()})
    attention_kernels.install(core)
    norm_kernel.install(counters)


def exchange_statistics(names: Mapping[str, list[str]]) -> None:
    """Give a rank what the last stage sends: the names of the loss's statistics, by role."""
    plain = all_gather_objects

    def gathered(value: Any) -> list[Any]:
        words = current().replace(",", "").split()
        return [*plain(value), *(found for name, found in names.items() if name in words)]

    replaced: Any = role
    replaced.all_gather_objects = gathered


def stage_holdings(case: RoleCase, hf_config: Any, world_size: int) -> list[list[tuple]]:
    """List the parameters of each pipeline stage, in the form that ``WeightStream`` exchanges."""
    table = parameter_table(model_shape(hf_config))
    layout: Layout = case.megatron.layout(world_size)
    layers = role_stage_layers(case, table.shape.num_layers, world_size)
    stages = []
    for stage, owned in enumerate(layers):
        ends = {"embedding"} if stage == 0 else set()
        if stage == layout.pp - 1:
            ends |= {"final", "output"}
        rows: list[tuple[Any, ...]] = [
            (r.where, None, r.name, torch.bfloat16) for r in table.rows if r.where in ends
        ]
        for layer in owned:
            for r in table.rows:
                if table.applies(r, layer):
                    dtype = torch.float32 if r.keep_fp32 else torch.bfloat16
                    rows.append((r.where, layer, r.name, dtype))
        stages.append(rows)
    return stages


def _follow_micro_batches(counters: Counters, hf_configs: Mapping[str, Any]) -> None:
    """Count micro-batches, and give a received shape the size of the last micro-batch cut."""
    plain_cut, tokens = role.cut, [0]

    def cut(batch: Any, indices: Any, multiple: int, *rest: Any) -> Any:
        found = plain_cut(batch, indices, multiple, *rest)
        counters.micro_batch()
        tokens[0] = len(found.tokens_t) // multiple
        return found

    def receive(tensor: Tensor) -> None:
        if tensor.dtype is not torch.int64 or tuple(tensor.shape) != (3,):
            forget([tensor])
            return
        words = current().replace(",", "").split()
        width = next(config.hidden_size for name, config in hf_configs.items() if name in words)
        attach_values(tensor, torch.tensor([tokens[0], 1, width]))

    role.cut = cut
    collectives.receive[0] = receive


def _fixed_choice(plain_choose: Any, share: float) -> Any:
    """Wrap the router's choice so that it selects a share of the experts equally often."""

    def choose_fixed(self: Any, scores: Tensor, topk: int, num_groups: Any, group_topk: Any,
                      choose: Any) -> Any:  # fmt: skip
        def even(scores: Tensor, topk: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
            choose(scores, topk, **kwargs)
            tokens, experts = scores.shape
            places = torch.arange(tokens)[:, None] * topk + torch.arange(topk)
            taken = (places % max(topk, int(share * experts))).to(scores.device)
            return scores.gather(1, taken), taken

        return plain_choose(self, scores, topk, num_groups, group_topk, even)

    return choose_fixed
