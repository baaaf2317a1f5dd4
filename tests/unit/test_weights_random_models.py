"""Models of random sizes: heads, vocabularies, expert counts, layer patterns, pipeline splits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import transformers as hf
from fake_stage import fake_stage
from hf_families import assert_same_tensors, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from mppo.parallel.layout import Layout
from mppo.recipe.model_shape import model_shape
from mppo.weights.blocks import padded_vocab_size
from mppo.weights.hf.input_folder import HFFolder
from mppo.weights.hf.output_folder import create_files, plan_places
from mppo.weights.hf.transfer import Copier
from mppo.weights.load_stages import load_hf_weights
from mppo.weights.table import LAYER, Entry, parameter_table
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.conversion import Share, plan_hf, plan_megatron
from mppo.weights.torch_dist.format import write_metadata

DENSE = {"qwen2": hf.Qwen2Config, "qwen3": hf.Qwen3Config, "gemma2": hf.Gemma2Config}
SPARSE = {
    "qwen2_moe": hf.Qwen2MoeConfig, "mixtral": hf.MixtralConfig, "deepseek_v3": hf.DeepseekV3Config,
}  # fmt: skip
FOURS = st.sampled_from([4, 8, 12])


@st.composite
def configs(draw):
    """A config of random sizes; dimensions cut by tensor parallelism are multiples of 4."""
    kind = draw(st.sampled_from([*DENSE, *SPARSE]))
    kv_heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    sizes = {
        "hidden_size": 4 * heads * draw(st.integers(1, 2)), "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": draw(FOURS), "intermediate_size": draw(FOURS),
        "vocab_size": draw(st.integers(5, 70)), "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    if kind in DENSE:
        return DENSE[kind](**sizes)
    experts = draw(st.integers(2, 6))
    count = {"mixtral": "num_local_experts", "deepseek_v3": "n_routed_experts"}
    sizes |= {count.get(kind, "num_experts"): experts, "num_experts_per_tok": 2}
    if kind != "mixtral":
        sizes["moe_intermediate_size"] = draw(FOURS)
    if kind == "qwen2_moe":
        dense = draw(st.sets(st.integers(0, layers - 1)))
        sizes |= {"mlp_only_layers": sorted(dense), "shared_expert_intermediate_size": draw(FOURS)}
    if kind == "deepseek_v3":
        del sizes["head_dim"]
        sizes |= {
            "q_lora_rank": draw(st.none() | FOURS), "kv_lora_rank": draw(FOURS),
            "qk_nope_head_dim": draw(FOURS), "qk_rope_head_dim": draw(FOURS),
            "v_head_dim": draw(FOURS), "first_k_dense_replace": draw(st.integers(0, layers)),
            "n_shared_experts": draw(st.integers(1, 2)), "n_group": 1, "topk_group": 1,
        }  # fmt: skip
    return SPARSE[kind](**sizes)


def write_folder(shape, folder, files: int, dtype: torch.dtype = torch.float32):
    """A folder of random weights in some safetensors files."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(files)]
    for number, (name, sizes) in enumerate(parameter_table(shape).hf_shapes().items()):
        kind = torch.float32 if name.endswith("correction_bias") else dtype
        parts[number % files][name] = torch.randn(sizes).to(kind)
    for number, part in enumerate(part for part in parts if part):
        save_file(part, folder / f"part{number}.safetensors")
    return folder


def run_shares(plans) -> None:
    """Carry out the shares of a plan, which divide it between them."""
    numbers = [number for plan in plans for number in plan.tasks]
    assert sorted(numbers) == list(range(plans[0].count))
    sizes = [[task.nbytes for task in plan.tasks.values()] for plan in plans]
    largest = max(itertools.chain(*sizes))
    assert max(map(sum, sizes)) <= plans[0].total_bytes / len(plans) + largest
    for path in plans[0].files:
        path.parent.mkdir(exist_ok=True)
    create_files(plans[0].files)
    copier = Copier(buffer_bytes=512)
    for plan in plans:
        for task in plan.tasks.values():
            copier.run(task)
    copier.close()


@settings(max_examples=12)
@given(
    config=configs(), world=st.integers(1, 3), files=st.integers(1, 3),
    most=st.sampled_from([600, 5000, 10**9]), dtype=st.sampled_from([torch.float, torch.bfloat16]),
)  # fmt: skip
def test_any_model_converts_and_comes_back(tmp_path_factory, config, world, files, most, dtype):
    folder, shape = tmp_path_factory.mktemp("random"), model_shape(config)
    (folder / "hf").mkdir()
    source, out = HFFolder(write_folder(shape, folder / "hf", files, dtype)), folder / "megatron"
    shares = [Share(rank, world) for rank in range(world)]
    planned = [
        plan_megatron(source, shape, out, share=share, max_file_bytes=most) for share in shares
    ]
    run_shares([plan for plan, _ in planned])
    write_metadata(out, planned[0][1].tensors, planned[0][1].objects, {})
    checkpoint, back = read_checkpoint(out), folder / "back"
    run_shares([plan_hf(checkpoint, shape, back, share=s, max_shard_bytes=most)[0] for s in shares])
    assert_same_tensors(tensors(back), tensors(folder / "hf"))


def test_shares_of_a_checkpoint_have_files_of_their_own(tmp_path):
    """The system lets one process at a time write to a file."""
    shape = model_shape(hf.LlamaConfig(vocab_size=4000, hidden_size=2048, num_hidden_layers=16))
    types = {n: (torch.bfloat16, size) for n, size in parameter_table(shape).hf_shapes().items()}
    (tmp_path / "hf").mkdir()
    create_files(plan_places(tmp_path / "hf", types, 10**9)[0])  # sparse: nothing is written
    source, out = HFFolder(tmp_path / "hf"), tmp_path / "megatron"
    plans = [plan_megatron(source, shape, out, share=Share(rank, 2))[0] for rank in range(2)]
    first, second = ({task.target.file for task in plan.tasks.values()} for plan in plans)
    assert min(len(first), len(second)) >= 8
    assert len(first & second) <= 1


def stage_of(table, layout: Layout, place, stage: range, ends: tuple[bool, bool]):
    """The parameters of a rank's stage as a module, with the entry of each by the module's name."""
    shape, entries, layers = table.shape, {}, []
    first_expert = place.ep * shape.num_experts // layout.ep
    for number, layer in enumerate(stage):
        names = {}
        for entry in table.layer_entries(layer):
            local = (entry.expert or 0) - first_expert
            if entry.expert is None or 0 <= local < shape.num_experts // layout.ep:
                name = entry.row.name.replace("{e}", str(local))
                names[name] = entry.shard_shape(group(entry, layout, place)[1])
                entries[LAYER.format(l=number) + name] = entry
        layers.append(names)
    at_ends = {"embedding": ends[0], "final": ends[1], "output": ends[1]}
    shapes = {}
    for row in table.rows:
        if at_ends.get(row.where):
            entry, size = Entry(row), group(Entry(row), layout, place)[1]
            shapes[row.name] = entry.shard_shape(size, padded_vocab_size(shape.vocab, size))
            entries[row.name] = entry
    return fake_stage(layers, shapes, stage.start + 1), entries


def group(entry, layout: Layout, place) -> tuple[int, int]:
    expert = entry.row.group == "etp"
    return (place.etp, layout.etp) if expert else (place.tp, layout.tp)


def parameters(chunk, entries) -> dict[Entry, torch.Tensor]:
    """The shard of each entry on a stage."""
    named = {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())}
    return {entry: named[name] for name, entry in entries.items()}


def cut(complete: torch.Tensor, row, rank: int, size: int) -> torch.Tensor:
    """Megatron's own rule: gate and up each cut, all else cut as it lies, vocabulary padded."""
    if row.dim is None:
        return complete
    if row.kind == "gated":
        return torch.cat([half.chunk(size)[rank] for half in complete.chunk(2)])
    if row.kind == "vocab":
        rows = padded_vocab_size(len(complete), size)
        complete = torch.cat([complete, torch.zeros(rows - len(complete), complete.shape[1])])
    return complete.chunk(size, row.dim)[rank]


def without_padding(entry: Entry, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """A shard without the rows that pad the vocabulary."""
    if entry.row.kind != "vocab":
        return tensor
    return tensor[: max(0, entry.row.shapes[0][0] - rank * len(tensor))]


@settings(max_examples=20)
@given(
    config=configs(), tp=st.sampled_from([1, 2, 4]), etp=st.sampled_from([1, 2, 4]), data=st.data()
)  # fmt: skip
def test_any_rank_of_any_layout_loads_its_slices(tmp_path_factory, config, tp, etp, data):
    shape = model_shape(config)
    table = parameter_table(shape)
    folder = write_folder(shape, tmp_path_factory.mktemp("random"), 2)
    count = shape.num_layers
    edges = sorted({0, count, *data.draw(st.sets(st.integers(1, count)))})
    ep = data.draw(st.sampled_from([n for n in range(1, 7) if shape.num_experts % n == 0]))
    layout = Layout(tp * etp * ep * (len(edges) - 1), tp, len(edges) - 1, ep=ep, etp=etp)
    place = layout.coordinates(data.draw(st.integers(0, layout.world - 1)))
    alone = Layout(1)
    model, of_model = stage_of(table, alone, alone.coordinates(0), range(count), (True, True))
    load_hf_weights(folder, [model], config, alone, alone.coordinates(0))
    stage = range(edges[place.pp], edges[place.pp + 1])
    ends = (stage.start == 0, stage.stop == count)
    chunk, entries = stage_of(table, layout, place, stage, ends)
    source = HFFolder(folder)
    load_hf_weights(source, [chunk], config, layout, place)
    complete, held = parameters(model, of_model), parameters(chunk, entries)
    for entry, tensor in held.items():
        expected = cut(complete[entry], entry.row, *group(entry, layout, place))
        assert torch.equal(tensor, expected), entry.name
    assert source.bytes_read == sum(
        without_padding(*pair, place.tp).nbytes for pair in held.items()
    )


EXPERTS = hf.Qwen2MoeConfig(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=512, vocab_size=512, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=256, shared_expert_intermediate_size=256,
)  # fmt: skip
HALVED = {
    "TP2": (Layout(2, tp=2, etp=2), 0.51),
    "PP2": (Layout(2, pp=2), 0.51),
    "EP2": (Layout(2, ep=2), 0.63),  # attention, shared experts and both ends on every rank
}
SMALL_READS = 20_000
"""Upper limit of other bytes read: the header, rounded up to a buffer, and the counter itself."""


def bytes_read_by_calls() -> int:
    """Bytes that this process has read by read calls, as counted by the kernel."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@pytest.mark.parametrize("name", HALVED)
def test_a_rank_reads_and_allocates_no_more_than_its_slices(tmp_path, name):
    shape, (layout, most) = model_shape(EXPERTS), HALVED[name]
    table = parameter_table(shape)
    folder = write_folder(shape, tmp_path, 1)
    total = sum(stored.nbytes for stored in HFFolder(folder).tensors.values())
    for rank in range(2):
        place = layout.coordinates(rank)
        stage = range(2) if layout.pp == 1 else range(place.pp, place.pp + 1)
        chunk, entries = stage_of(table, layout, place, stage, (place.pp == 0, stage.stop == 2))
        before = bytes_read_by_calls()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as allocations:
            source = HFFolder(folder)
            load_hf_weights(source, [chunk], EXPERTS, layout, place)
        called = bytes_read_by_calls() - before
        held = parameters(chunk, entries)
        mapped = sum(
            tensor.nbytes
            for entry, tensor in held.items()
            if entry.row.dim == 1 and group(entry, layout, place)[1] == 2
        )
        assert source.bytes_read == sum(tensor.nbytes for tensor in held.values())
        assert source.bytes_read <= most * total
        assert 0 <= called - (source.bytes_read - mapped) <= SMALL_READS
        assert not any(event.cpu_memory_usage > 0 for event in allocations.events())
