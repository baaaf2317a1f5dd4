"""Hugging Face folders and file transfers: exact slices, clear errors, bounded windows."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hf_families import save, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoints_convert.verify import HOLE
from mppo.recipe.model_shape import model_shape
from mppo.weights.hf.input_folder import HFFolder
from mppo.weights.hf.safetensors_file import make_header, read_header
from mppo.weights.hf.transfer import Copier, CopyTask, Stretch
from mppo.weights.table import parameter_table


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save("llama", tmp_path_factory.mktemp("hf") / "llama")


def copy_of(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_slices_are_those_of_the_whole_tensor(llama):
    folder, complete = HFFolder(llama), tensors(llama)
    name = "model.layers.1.mlp.down_proj.weight"
    for dim, start, length in ((0, 3, 5), (1, 10, 7), (0, 0, 64), (1, 95, 1)):
        expected = complete[name].narrow(dim, start, length)
        for dtype in (torch.float32, torch.bfloat16):
            target = torch.empty(expected.shape, dtype=dtype)
            folder.read_into(target, name, dim, start)
            assert torch.equal(target, expected.to(dtype))
    strided = torch.empty(96, 64).t()
    folder.read_into(strided, name)
    assert torch.equal(strided, complete[name])


def test_a_slice_outside_is_refused(llama):
    with pytest.raises(ValueError, match="does not hold"):
        HFFolder(llama).read_into(torch.empty(5, 64), "model.norm.weight")


def test_a_missing_shard_is_named(llama, tmp_path):
    folder = copy_of(llama, tmp_path)
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match=r"names model-00002.*not in the folder"):
        HFFolder(folder)


@pytest.mark.parametrize("keep", [4, 40, 2000])
def test_a_shard_cut_short_is_named(llama, tmp_path, keep):
    folder = copy_of(llama, tmp_path)
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{file.name}.*cut short"):
        HFFolder(folder)


def test_folders_without_safetensors_or_with_a_wrong_index_are_refused(llama, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        HFFolder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        HFFolder(tmp_path / "empty")
    folder = copy_of(llama, tmp_path)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.ghost.weight"] = next(iter(index["weight_map"].values()))
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.ghost\.weight"):
        HFFolder(folder)


def test_a_tensor_stored_twice_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"x": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="x is stored in"):
        HFFolder(tmp_path)


def quantised(tmp_path, rows=200, columns=150, block=(128, 128)):
    torch.manual_seed(0)
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    save_file({"w": weight, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * spread[:rows, :columns]


def test_eight_bit_floats_are_dequantised_block_by_block(tmp_path):
    expected = quantised(tmp_path)
    folder = HFFolder(tmp_path)
    assert list(folder.tensors) == ["w"]
    assert torch.equal(folder.read("w"), expected)
    for dim, start, length in ((0, 120, 20), (1, 100, 50)):
        part = torch.empty(expected.narrow(dim, start, length).shape)
        folder.read_into(part, "w", dim, start)
        assert torch.equal(part, expected.narrow(dim, start, length))


def test_the_copier_dequantises_the_same(tmp_path):
    from mppo.weights.hf.transfer import Scales

    expected = quantised(tmp_path).to(torch.bfloat16)
    folder, out = HFFolder(tmp_path), tmp_path / "out.safetensors"
    head, places = make_header({"w": (torch.bfloat16, (200, 150))}, out)
    out.write_bytes(head + b"\0" * places["w"].nbytes)
    stretch = Stretch(folder.tensors["w"], 0, 0, 200, scales=Scales(*folder.scales("w")))
    copier = Copier(buffer_bytes=4096)
    copier.run(CopyTask("w", places["w"], (stretch,)))
    copier.close()
    assert torch.equal(load_file(out)["w"], expected)


def test_eight_bit_floats_without_scales_are_refused(tmp_path):
    save_file({"w": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="without w_scale_inv"):
        HFFolder(tmp_path).read("w")


@settings(max_examples=30)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 12), cuts=st.lists(st.integers(0, 40)),
    buffer=st.integers(1, 300), column_cut=st.integers(1, 12),
)  # fmt: skip
def test_any_tiling_is_copied_exactly(tmp_path_factory, rows, columns, cuts, buffer, column_cut):
    folder = tmp_path_factory.mktemp("tiles")
    source = torch.randn(rows, columns)
    edges = sorted({0, rows, *(c for c in cuts if c < rows)})
    column_edges = sorted({0, columns, *([column_cut] if column_cut < columns else [])})
    boxes = [
        (top, bottom, left, right)
        for top, bottom in itertools.pairwise(edges)
        for left, right in itertools.pairwise(column_edges)
    ]
    parts = {
        str(i): source[t:b, left:right].contiguous() for i, (t, b, left, right) in enumerate(boxes)
    }
    save_file(parts, folder / "parts.safetensors")
    stored = read_header(folder / "parts.safetensors")
    out = folder / "out.safetensors"
    head, places = make_header({"x": (torch.float32, (rows, columns))}, out)
    out.write_bytes(head + b"\0" * places["x"].nbytes)
    stretches = tuple(
        Stretch(stored[str(i)], 0, t, b - t, left) for i, (t, b, left, _) in enumerate(boxes)
    )
    copier, task = Copier(buffer_bytes=buffer), CopyTask("x", places["x"], stretches)
    copier.run(task)
    assert all(len(part) <= max(buffer, 4 * columns) for _, part in copier.windows(task))
    copier.close()
    assert torch.equal(load_file(out)["x"], source)


def test_a_hole_among_the_sources_shows_as_nans(llama):
    stored = HFFolder(llama).tensors["model.norm.weight"]
    twice = Stretch(stored, 0, 0, 32), Stretch(stored, 0, 0, 32)  # the area fits, the rest is bare
    copier = Copier()
    ((_, window),) = copier.windows(CopyTask("x", stored, twice), HOLE)
    copier.close()
    assert (
        torch.from_numpy(window).view(torch.float32).isnan().tolist() == [False] * 32 + [True] * 32
    )


def test_sources_that_do_not_fill_the_target_are_refused(llama):
    stored = HFFolder(llama).tensors["model.norm.weight"]
    with pytest.raises(ValueError, match="fill 63 of 64"):
        CopyTask("x", stored, (Stretch(stored, 0, 0, 63),))


def test_the_table_names_what_transformers_saves(llama):
    from transformers import AutoConfig

    table = parameter_table(model_shape(AutoConfig.from_pretrained(llama)))
    assert table.hf_shapes() == {name: tuple(t.shape) for name, t in tensors(llama).items()}
