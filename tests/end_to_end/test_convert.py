"""The conversion tool as a user runs it: both ways, in parallel, interrupted, and on bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from hf_families import CONFIGS, assert_same_tensors, save, tensors
from safetensors.torch import load_file, save_file

import checkpoints_convert.job as job
from checkpoints_convert.__main__ import main
from mppo.weights.torch_dist import locate, read_checkpoint
from mppo.weights.transfer import Copier

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by family, made when first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        return folder / name if (folder / name).exists() else save(name, folder / name)

    return get


def to_megatron(source: Path, out: Path, *options: str) -> int:
    return main(["hf-to-megatron", "--hf", str(source), "--megatron", str(out), *options])


def to_hf(source: Path, out: Path, *options: str) -> int:
    return main(["megatron-to-hf", "--megatron", str(source), "--hf", str(out), *options])


def verify(folder: Path, checkpoint: Path, *options: str) -> int:
    return main(["verify", "--hf", str(folder), "--megatron", str(checkpoint), *options])


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_byte_identical(models, tmp_path, name):
    folder = models(name)
    assert to_megatron(folder, tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--max-shard-gb", "0.0001") == 0
    assert_same_tensors(tensors(tmp_path / "back"), tensors(folder))
    assert (tmp_path / "back" / "tokenizer.json").exists()
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 1
    assert verify(folder, tmp_path / "megatron") == 0
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("name", ["qwen2_tied", "gemma2", "qwen2_moe", "deepseek_v2"])
def test_logits_are_verified(models, tmp_path, capsys, name):
    assert to_megatron(models(name), tmp_path / "megatron") == 0
    assert verify(models(name), tmp_path / "megatron", "--logits") == 0
    assert "logits equal" in capsys.readouterr().out


def test_transformers_loads_the_export(models, tmp_path):
    assert to_megatron(models("qwen3_moe"), tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 0
    ours, theirs = (
        hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (tmp_path / "back", models("qwen3_moe"))
    )
    assert_same_tensors(ours, theirs)


def test_dtypes_are_kept_or_cast_except_the_routers_bias(tmp_path):
    folder = save("moonlight", tmp_path / "hf", torch.bfloat16)
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        stored = load_file(file)
        biases = {k: v.float() for k, v in stored.items() if k.endswith("correction_bias")}
        save_file({**stored, **biases}, file, {"format": "pt"})
    assert to_megatron(folder, tmp_path / "kept") == 0
    assert to_hf(tmp_path / "kept", tmp_path / "kept_hf") == 0
    assert_same_tensors(tensors(tmp_path / "kept_hf"), tensors(folder))
    assert to_megatron(folder, tmp_path / "wide", "--dtype", "float32") == 0
    assert to_hf(tmp_path / "wide", tmp_path / "back", "--dtype", "bfloat16") == 0
    assert_same_tensors(tensors(tmp_path / "back"), tensors(folder))
    assert verify(folder, tmp_path / "wide") == 0


def test_extra_prediction_layers_are_kept_aside_when_asked(tmp_path):
    folder = save("moonlight", tmp_path / "hf", num_nextn_predict_layers=1)
    (folder / "model.safetensors.index.json").unlink()
    extra = {"model.layers.4.eh_proj.weight": torch.randn(64, 128)}
    save_file(extra, folder / "extra.safetensors")
    for option, expected in (((), 0), (("--keep-extra",), 1)):
        checkpoint = tmp_path / f"megatron{expected}"
        assert to_megatron(folder, checkpoint, *option) == 0
        assert to_hf(checkpoint, tmp_path / f"back{expected}") == 0
        kept = tensors(tmp_path / f"back{expected}")
        assert len(set(kept) & set(extra)) == expected
    assert_same_tensors(kept, tensors(folder))


def test_a_changed_byte_is_found(models, tmp_path, capsys):
    assert to_megatron(models("qwen2"), tmp_path / "megatron") == 0
    checkpoint = read_checkpoint(tmp_path / "megatron" / "release")
    place = locate(checkpoint["output_layer.weight"].chunks[0])
    content = bytearray(place.file.read_bytes())
    content[place.offset + place.nbytes // 2] ^= 1
    place.file.write_bytes(content)
    assert verify(models("qwen2"), tmp_path / "megatron") == 1
    assert "DIFFERENT" in capsys.readouterr().out


class Interrupted(Exception):
    """Stands for a kill."""


def test_an_interrupted_run_leaves_nothing_and_is_continued(models, tmp_path, monkeypatch):
    folder, out = models("qwen2_moe"), tmp_path / "megatron"
    run, done = Copier.run, []

    def stop_half_way(self, task):
        if len(done) == 30:
            raise Interrupted
        done.append(task.name)
        run(self, task)

    monkeypatch.setattr(job, "FLUSH_BYTES", 1)
    monkeypatch.setattr(Copier, "run", stop_half_way)
    with pytest.raises(Interrupted):
        to_megatron(folder, out)
    assert not out.exists()
    monkeypatch.setattr(Copier, "run", lambda self, task: (done.append(task.name), run(self, task)))
    assert to_megatron(folder, out) == 0
    assert len(done) == len(set(done)) == 61
    assert verify(folder, out) == 0


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_processes_share_the_work(models, tmp_path, launcher):
    folder = models("deepseek_v3")
    if launcher == "torchrun":
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
        ]
        start += ["-m", "checkpoints_convert"]
    else:
        mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
        if mpirun is None:
            pytest.skip('no mpirun beside this Python: pip install "mppo[mpi]"')
        start = [mpirun, "-n", "2", sys.executable]
        start += ["-m", "checkpoints_convert"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (
        ["hf-to-megatron", "--hf", folder, "--megatron", tmp_path / "megatron"],
        ["verify", "--logits", "--hf", folder, "--megatron", tmp_path / "megatron"],
        ["megatron-to-hf", "--hf", tmp_path / "back", "--megatron", tmp_path / "megatron"],
    ):
        subprocess.run([*start, *map(str, command)], check=True, env=environment, cwd=tmp_path)
    assert_same_tensors(tensors(tmp_path / "back"), tensors(folder))


def edited_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def cut_short(folder: Path) -> None:
    file = next(folder.glob("model-00001*"))
    file.write_bytes(file.read_bytes()[:1000])


def wrong_dtype(folder: Path) -> None:
    file = next(folder.glob("model-00001*"))
    stored = load_file(file)
    name = next(name for name, tensor in stored.items() if tensor.dim() == 2)
    stored[name] = stored[name].to(torch.float8_e4m3fn)
    save_file(stored, file)


def several_labels(folder: Path) -> None:
    save_file({"score.weight": torch.zeros(3, 64)}, folder / "score.safetensors")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["score.weight"] = "score.safetensors"
    file.write_text(json.dumps(index))


BAD = {
    "missing shard": (lambda f: next(f.glob("model-00002*")).unlink(), "not in the folder"),
    "truncated": (cut_short, "cut short"),
    "8-bit floats without scales": (wrong_dtype, "_scale_inv"),
    "more layers": (lambda f: edited_config(f, num_hidden_layers=5), "tensors are missing"),
    "fewer layers": (lambda f: edited_config(f, num_hidden_layers=3), "does not have"),
    "other width": (lambda f: edited_config(f, intermediate_size=80), "do not belong together"),
    "several labels": (several_labels, "num_labels=1"),
    "no such family": (lambda f: edited_config(f, model_type="gpt2"), "no such family"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
    "no config": (lambda f: (f / "config.json").unlink(), "no such file"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "unreadable"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_and_leaves_nothing(models, tmp_path, capsys, case):
    folder, out = tmp_path / "hf", tmp_path / "megatron"
    shutil.copytree(models("llama"), folder)
    spoil, message = BAD[case]
    spoil(folder)
    assert to_megatron(folder, out) == 2
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_full_disk_is_told_before_writing(models, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert to_megatron(models("llama"), tmp_path / "megatron") == 2
    assert "GB needed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_no_complete_folder(models, tmp_path, capsys, monkeypatch):
    def full(descriptor, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert to_megatron(models("llama"), tmp_path / "megatron") == 2
    assert "No space left" in capsys.readouterr().err
    assert not (tmp_path / "megatron").exists()


def test_bad_checkpoints_and_outputs_that_exist_are_told(models, tmp_path, capsys):
    assert to_hf(tmp_path, tmp_path / "back") == 2
    assert "no torch_dist checkpoint" in capsys.readouterr().err
    assert to_megatron(models("llama"), tmp_path / "megatron") == 0
    assert to_megatron(models("llama"), tmp_path / "megatron") == 2
    assert "already exists" in capsys.readouterr().err
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--config", str(models("qwen3"))) == 2
    assert "of another model" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "megatron" / "hf")
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 2
    assert "--config" in capsys.readouterr().err
    next((tmp_path / "megatron" / "release").glob("*.distcp")).unlink()
    assert verify(models("llama"), tmp_path / "megatron") == 2
    assert "is missing" in capsys.readouterr().err


def test_inspect_lists_what_a_folder_holds(models, tmp_path, capsys):
    assert main(["inspect", str(models("llama"))]) == 0
    assert "model.norm.weight" in capsys.readouterr().out
    assert to_megatron(models("llama"), tmp_path / "megatron") == 0
    assert main(["inspect", str(tmp_path / "megatron")]) == 0
    assert "decoder.layers.self_attention.linear_qkv.weight" in capsys.readouterr().out
