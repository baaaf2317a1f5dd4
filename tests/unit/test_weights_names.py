"""Names of other layer specs: stages with Transformer Engine's parameter names load the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_stage import fake_stage
from hf_families import save, tensors
from safetensors.torch import save_file
from transformers import AutoConfig

from mppo.parallel.layout import Layout
from mppo.recipe.model_shape import model_shape
from mppo.weights.load_stages import load_hf_weights
from mppo.weights.slots import assert_partition, find_slots
from mppo.weights.table import parameter_table

DENSE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
    "self_attention.linear_qkv.weight": None,
    "self_attention.linear_qkv.bias": None,
    "self_attention.linear_proj.weight": None,
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
    "mlp.linear_fc1.weight": None,
    "mlp.linear_fc2.weight": None,
}
LATENT = (
    "input_layernorm.weight", "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_proj.weight",
)  # fmt: skip


def folder_of(name, tmp_path_factory):
    folder = save(name, tmp_path_factory.mktemp("twin") / name)
    config = AutoConfig.from_pretrained(folder)
    return folder, config, parameter_table(model_shape(config))


def loaded(chunk, folder, config, layout=None):
    layout = layout or Layout(world=1)
    assert load_hf_weights(folder, [chunk], config, layout, layout.coordinates(0)) == ()
    assert not any(p.isnan().any() for p in chunk.parameters())
    return dict(chunk.named_parameters())


def ends(table, tied=False):
    names = [row for row in table.rows if row.where in ("embedding", "final", "output")]
    return {
        row.name: row.shapes[0] for row in names if not (tied and row.where == "output")
    }  # fmt: skip


def te_names(table, layer: int) -> dict[str, tuple[int, ...]]:
    """Names Transformer Engine's spec gives a layer's parameters, and their shapes."""
    sparse, names = table.shape.sparse_layers[layer], {}
    for entry in table.layer_entries(layer):
        row, name = entry.row, entry.row.name
        if row.where == "expert":
            name = row.aliases[0].replace("{e}", str(entry.expert))
        elif row.aliases and not (name == "pre_mlp_layernorm.weight" and sparse):
            name = row.aliases[0]
        names[name] = entry.shard_shape(1)
    return names


def test_a_dense_te_layer_has_these_names(tmp_path_factory):
    folder, config, table = folder_of("qwen2", tmp_path_factory)
    layers = [te_names(table, layer) for layer in range(4)]
    assert set(layers[0]) == set(DENSE)
    parameters, complete = loaded(fake_stage(layers, ends(table)), folder, config), tensors(folder)
    for name, hf in DENSE.items():
        if hf:
            got = parameters[f"decoder.layers.2.{name}"]
            assert torch.equal(got, complete[f"model.layers.2.{hf}.weight"])
    q, k, v = (complete[f"model.layers.1.self_attn.{x}_proj.bias"].view(2, -1) for x in "qkv")
    interleaved = torch.cat([q, k, v], 1).flatten()
    assert torch.equal(parameters["decoder.layers.1.self_attention.linear_qkv.bias"], interleaved)


def test_gpt_neox_from_a_folder_with_masks_and_rotary_frequencies(tmp_path_factory):
    """As the published files of Pythia hold them; biases have Transformer Engine's names too."""
    folder, config, table = folder_of("gpt_neox", tmp_path_factory)
    complete = tensors(folder)
    buffers = {
        "bias": torch.ones(1, 1, 9, 9, dtype=torch.bool), "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.ones(2),
    }  # fmt: skip
    old = {f"gpt_neox.layers.3.attention.{name}": tensor for name, tensor in buffers.items()}
    for file in folder.glob("model*"):
        file.unlink()
    save_file({**complete, **old}, folder / "model.safetensors")
    layers = [te_names(table, layer) for layer in range(4)]
    parameters = loaded(fake_stage(layers, ends(table)), folder, config)
    for ours, theirs in {
        "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
        "mlp.linear_fc1.layer_norm_bias": "post_attention_layernorm.bias",
        "self_attention.linear_qkv.weight": "attention.query_key_value.weight",
        "self_attention.linear_proj.bias": "attention.dense.bias",
        "mlp.linear_fc1.bias": "mlp.dense_h_to_4h.bias",
    }.items():
        got = parameters[f"decoder.layers.2.{ours}"]
        assert torch.equal(got, complete[f"gpt_neox.layers.2.{theirs}"]), ours
    unknown = {**complete, "gpt_neox.layers.3.attention.rotary_emb.other": torch.ones(2)}
    save_file(unknown, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tensors that a gpt_neox of 4 layers does not have"):
        loaded(fake_stage(layers, ends(table)), folder, config)


def test_te_grouped_experts_and_fused_latent_norms(tmp_path_factory):
    folder, config, table = folder_of("deepseek_v3", tmp_path_factory)
    layers = [te_names(table, layer) for layer in range(4)]
    assert set(LATENT) <= set(layers[0])
    assert "mlp.experts.linear_fc1.weight15" in layers[1]
    assert "pre_mlp_layernorm.weight" in layers[1]
    assert "mlp.linear_fc1.layer_norm_weight" in layers[0]
    parameters, complete = loaded(fake_stage(layers, ends(table)), folder, config), tensors(folder)
    start = "model.layers.3.mlp.experts.7"
    fc1 = torch.cat([complete[f"{start}.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(parameters["decoder.layers.3.mlp.experts.linear_fc1.weight7"], fc1)


def test_te_keeps_latent_down_projections_whole_under_tensor_parallelism(tmp_path_factory):
    folder, config, table = folder_of("deepseek_v3", tmp_path_factory)
    layout = Layout(world=2, tp=2, etp=2)
    layers = []
    for layer in range(4):
        names = te_names(table, layer)
        for entry in table.layer_entries(layer):
            if entry.row.dim is not None and "down_proj" not in entry.row.name:
                name = entry.row.name
                if entry.row.where == "expert":
                    name = entry.row.aliases[0].replace("{e}", str(entry.expert))
                names[name] = entry.shard_shape(2)
        layers.append(names)
    cut = {
        name: (-(-shape[0] // 2), shape[1]) if len(shape) > 1 else shape
        for name, shape in ends(table).items()
    }
    parameters, complete = loaded(fake_stage(layers, cut), folder, config, layout), tensors(folder)
    down = parameters["decoder.layers.1.self_attention.linear_kv_down_proj.weight"]
    assert torch.equal(down, complete["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"])


def test_experts_stored_transposed_in_one_matrix(tmp_path_factory):
    folder, config, table = folder_of("qwen3_moe", tmp_path_factory)
    shape, layers = table.shape, []
    for layer in range(4):
        names = {n: s for n, s in te_names(table, layer).items() if ".experts." not in n}
        width = shape.num_experts * shape.expert_ffn
        names["mlp.experts.weight1"] = (shape.hidden, 2 * width)
        names["mlp.experts.weight2"] = (width, shape.hidden)
        layers.append(names)
    chunk = fake_stage(layers, ends(table))
    for layer in chunk.decoder.layers:
        layer.mlp.experts.num_local_experts = shape.num_experts
        layer.mlp.experts.config = SimpleNamespace(hidden_size=shape.hidden)
    parameters, complete = loaded(chunk, folder, config), tensors(folder)
    second = parameters["decoder.layers.0.mlp.experts.weight2"].view(4, -1, shape.hidden)
    for expert in range(4):
        down = complete[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"]
        assert torch.equal(second[expert].t(), down)


def test_stages_that_do_not_match_are_reported(tmp_path_factory):
    _, _, table = folder_of("qwen2", tmp_path_factory)
    layers = [te_names(table, layer) for layer in range(4)]
    place = (table, Layout(world=1), Layout(world=1).coordinates(0))
    with pytest.raises(ValueError, match=r"no parameter decoder\.layers\.0\.mlp\.gate"):
        find_slots([fake_stage([{**layers[0], "mlp.gate": (2,)}], {})], *place)
    with pytest.raises(ValueError, match="stage has shape"):
        find_slots([fake_stage([{**layers[0], "mlp.linear_fc2.weight": (64, 95)}], {})], *place)
    lacking = {n: s for n, s in layers[0].items() if n != "mlp.linear_fc2.weight"}
    with pytest.raises(ValueError, match=r"lacks decoder\.layers\.0\.mlp\.linear_fc2"):
        find_slots([fake_stage([lacking], {})], *place)


def test_a_dimension_sharded_otherwise_than_in_megatron_is_refused(tmp_path_factory):
    folder, config, table = folder_of("qwen2", tmp_path_factory)
    layout = Layout(world=2, tp=2)
    layers = [
        {entry.row.name: entry.shard_shape(2) for entry in table.layer_entries(layer)}
        for layer in range(4)
    ]
    chunk = fake_stage(layers, {})
    for layer in chunk.decoder.layers:
        for name, dim in (("linear_qkv", 0), ("linear_proj", 1)):
            weight = layer.get_submodule(f"self_attention.{name}").weight
            weight.tensor_model_parallel, weight.partition_dim = True, dim
    slots = find_slots([chunk], table, layout, layout.coordinates(1))
    assert_partition([chunk], slots)
    weight.partition_dim = 0
    with pytest.raises(AssertionError, match=r"layers\.3\..*linear_proj.*dimension 0, the table 1"):
        load_hf_weights(folder, [chunk], config, layout, layout.coordinates(1))
