"""A converted checkpoint loads in plain megatron.core: its GPTModel, its loader, no code of
this project on the ranks. What each rank holds is compared with slices worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from hf_families import tensors
from plain_megatron import EXPERTS, SIZES, load
from tiny_models import save

from checkpoints_convert.__main__ import main

CASES = [("llama", "TP2"), ("llama", "PP2"), ("qwen3_moe", "EP2"), ("qwen3_moe", "TP2")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Hugging Face tensors of each model, and the tensors that two plain ranks loaded."""
    folder = tmp_path_factory.mktemp("plain")
    models = {}
    for name in {model for model, _ in CASES}:
        save(name, folder / name)
        arguments = ["--hf", str(folder / name), "--megatron", str(folder / f"{name}_megatron")]
        assert main(["hf-to-megatron", "--no-tokenizer", *arguments]) == 0
        models[name] = tensors(folder / name)
    mp.start_processes(load, (folder, CASES), nprocs=2, start_method="spawn")
    return models, [torch.load(folder / f"got-{rank}.pt") for rank in range(2)]


def half(tensor: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(2, dim)[rank]


def interleaved(hf: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """Queries of a group, then its key, then its value, group after group."""
    groups = SIZES["num_query_groups"]
    parts = [hf[f"{prefix}.{x}_proj.weight"].chunk(groups) for x in "qkv"]
    return torch.cat([torch.cat(group) for group in zip(*parts, strict=True)])


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_plain_megatron_core_loads_the_checkpoint(case, loaded):
    models, got = loaded
    hf = models[case[0]]
    for rank in range(2):
        first, parameters = got[rank][case]
        for name, parameter in parameters.items():
            rows = 50 if name.startswith(("embedding", "output_layer")) else None  # then padding
            assert not parameter[:rows].isnan().any(), name
        layer, theirs = parameters, f"model.layers.{first}"
        split = case[1] == "TP2"
        qkv = interleaved(hf, f"{theirs}.self_attn")
        proj = hf[f"{theirs}.self_attn.o_proj.weight"]
        own = "decoder.layers.0"
        assert torch.equal(
            layer[f"{own}.self_attention.linear_qkv.weight"], half(qkv, rank) if split else qkv
        )
        assert torch.equal(
            layer[f"{own}.self_attention.linear_proj.weight"],
            half(proj, rank, 1) if split else proj,
        )
        norm = hf[f"{theirs}.input_layernorm.weight"]
        assert torch.equal(layer[f"{own}.input_layernorm.weight"], norm)


def test_feed_forward_halves_hold_gate_and_up(loaded):
    models, got = loaded
    hf, prefix = models["llama"], "model.layers.0.mlp"
    for rank in range(2):
        _, parameters = got[rank]["llama", "TP2"]
        gate, up = (half(hf[f"{prefix}.{x}_proj.weight"], rank) for x in ("gate", "up"))
        complete = torch.cat([gate, up])
        assert torch.equal(parameters["decoder.layers.0.mlp.linear_fc1.weight"], complete)


def test_experts_are_those_of_the_rank(loaded):
    models, got = loaded
    hf = models["qwen3_moe"]
    for rank in range(2):
        _, parameters = got[rank]["qwen3_moe", "EP2"]
        for expert in range(2):
            theirs = hf[f"model.layers.3.mlp.experts.{2 * rank + expert}.down_proj.weight"]
            name = f"decoder.layers.3.mlp.experts.local_experts.{expert}.linear_fc2.weight"
            assert torch.equal(parameters[name], theirs)


def test_both_ends_of_the_pipeline_are_there(loaded):
    models, got = loaded
    hf = models["llama"]
    ends = (("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            ("output_layer.weight", "lm_head.weight"))  # fmt: skip
    for rank, (name, theirs) in enumerate(ends):
        _, parameters = got[rank]["llama", "PP2"]
        assert torch.equal(parameters[name][: len(hf[theirs])], hf[theirs])


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_the_arguments_are_those_of_a_run_that_saved_it(model, loaded):
    _, got = loaded
    sizes = SIZES | (EXPERTS if model == "qwen3_moe" else {})
    for rank in range(2):
        version, arguments = got[rank][model]
        assert version == 3.0
        shared = arguments.keys() & sizes.keys()
        assert {"num_layers", "hidden_size", "num_attention_heads"} <= shared
        assert {name: arguments[name] for name in shared} == {name: sizes[name] for name in shared}
        assert (arguments["tensor_model_parallel_size"], arguments["no_save_optim"]) == (1, True)
