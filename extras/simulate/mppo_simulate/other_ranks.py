"""Stand-ins for data that a single simulated rank does not have.

These are the files of weights, the parameters of other pipeline stages, and the routers' expert
choices, which depend on numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mppo.models import role_weights
from mppo.models.attention import core
from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.layout import Layout
from mppo.planning.memory import role_stage_layers
from mppo.recipe.model_shape import model_shape
from mppo.recipe.sections.role_config import RoleConfig
from mppo.trainer import run_roles
from mppo.weights import stream
from mppo.weights.hf.input_folder import HFFolder
from mppo.weights.hf.safetensors_file import StoredTensor
from mppo.weights.load_stages import load_hf_weights
from mppo.weights.table import parameter_table
from mppo_simulate.expert_choices import ExpertChoices
from mppo_simulate.gpu import attention_kernels, norm_kernel
from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.recorder import RankRecorder


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
        self._scales = {}

    def read_into(self, target: Tensor, name: str, dim: int = 0, start: int = 0) -> None:
        """Copy zeros from the host to ``target``, like a slice of a file."""
        target.copy_(torch.zeros((), dtype=target.dtype).expand(target.shape))


def install(
    cases: Mapping[str, tuple[RoleConfig, Any]],
    world_size: int,
    counters: Counters,
    recorder: RankRecorder,
    uneven: bool,
) -> None:
    """Replace the functions that need this data by stand-ins.

    Args:
        cases: recipe section and Hugging Face config of each role, by name.
        world_size: number of ranks.
        counters: counters of the rank, which also count micro-batches.
        recorder: records the accesses of the kernel of norms.
        uneven: see ``ExpertChoices``.
    """

    def load_weights(path: Any, chunks: Any, hf_config: Any, groups: Any) -> tuple[str, ...]:
        folder: Any = EmptyFolder(hf_config)
        return load_hf_weights(folder, chunks, hf_config, groups.layout, groups.coordinates)

    role_weights.load_weights = load_weights
    run_roles.resolve_model = lambda path, seed=0: Path(path)
    case, hf_config = cases["actor"]
    everyone = stage_holdings(case, hf_config, world_size)

    def of_all_stages(held: list[tuple], size: int, group: Any = None) -> list[list[tuple]]:
        all_gather_objects(held, size, group)
        return [held] if size == 1 else everyone

    replaced: Any = stream
    replaced.all_gather_objects = of_all_stages
    ExpertChoices(counters, uneven).install()
    attention_kernels.install(core)
    norm_kernel.install(counters, recorder)


def stage_holdings(case: RoleConfig, hf_config: Any, world_size: int) -> list[list[tuple]]:
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
