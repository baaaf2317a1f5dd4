"""The conversion tool from the command line: both ways, in parallel, interrupted, on bad input."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers as hf
from hf_families import CONFIGS, assert_same_tensors, save, tensors
from launched_run import LaunchedRun, mpirun
from malicious_pickle import add_malicious_pickle
from safetensors.torch import load_file, save_file

import checkpoints_convert.job as job
from checkpoints_convert.__main__ import main
from mppo.weights.hf.transfer import Copier
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.format import locate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model folders by family, created at the first access."""
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


COMPARED = ("gemma2", "deepseek_v2", "moonlight")
"""Families whose logits the tool compares here; other tests compare all on every layout."""
COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json")


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_byte_identical_and_the_logits_are_equal(models, tmp_path, capsys, name):
    folder, back = models(name), tmp_path / "back"
    assert to_megatron(folder, tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", back, "--max-shard-gb", "0.0001") == 0
    assert_same_tensors(tensors(back), tensors(folder))
    index = json.loads((back / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors(folder).keys()
    assert {back / file for file in index.values()} == set(back.glob("*.safetensors"))
    assert len(set(index.values())) > 1
    for file in COMPANIONS:
        assert json.loads((back / file).read_text()) == json.loads((folder / file).read_text())
    assert verify(folder, tmp_path / "megatron", *(["--logits"] if name in COMPARED else [])) == 0
    assert ("logits equal" in capsys.readouterr().out) == (name in COMPARED)
    assert not list(tmp_path.glob(".*.partial"))


def test_transformers_loads_the_export_and_progress_is_printed(models, tmp_path, capsys):
    assert to_megatron(models("qwen3_moe"), tmp_path / "megatron") == 0
    assert re.search(r"#{30}\] 100\.0%  0\.00 GB  [0-9.]+ GB/s", capsys.readouterr().err)
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--max-shard-gb", "0.0001") == 0
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


def test_multi_token_prediction_layers_are_reported_and_kept_with_keep_extra(tmp_path, capsys):
    folder = save("moonlight", tmp_path / "hf", num_nextn_predict_layers=1)
    (folder / "model.safetensors.index.json").unlink()
    extra = {"model.layers.4.eh_proj.weight": torch.randn(64, 128)}
    save_file(extra, folder / "extra.safetensors")
    for option, expected in (((), 0), (("--keep-extra",), 1)):
        checkpoint = tmp_path / f"megatron{expected}"
        assert to_megatron(folder, checkpoint, *option) == 0
        said = "1 tensors are not part of the model, such as model.layers.4.eh_proj.weight"
        assert said in capsys.readouterr().out
        assert to_hf(checkpoint, tmp_path / f"back{expected}") == 0
        kept = tensors(tmp_path / f"back{expected}")
        assert len(set(kept) & set(extra)) == expected
    assert_same_tensors(kept, tensors(folder))


def eight_bit(folder: Path, block: int) -> dict[str, torch.Tensor]:
    """Store a folder's projections as 8-bit floats with scales; the dequantised values."""
    meant = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored = load_file(file)
        meant |= stored
        for name in [name for name in stored if "_proj" in name]:
            small = stored[name].to(torch.float8_e4m3fn)
            scales = 0.5 + torch.rand([-(-length // block) for length in small.shape])
            stored |= {name: small, f"{name}_scale_inv": scales}
            spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
            rows, columns = small.shape
            meant[name] = (small.float() * spread[:rows, :columns]).bfloat16()
        save_file(stored, file)
    edited_config(
        folder, quantization_config={"quant_method": "fp8", "weight_block_size": [block, block]}
    )
    return meant


def test_eight_bit_floats_come_back_dequantised(tmp_path):
    folder = save("deepseek_v3", tmp_path / "hf", torch.bfloat16, num_nextn_predict_layers=1)
    (folder / "model.safetensors.index.json").unlink()
    extra = {"model.layers.4.eh_proj.weight": torch.randn(64, 128)}
    save_file(extra, folder / "extra.safetensors")
    meant = eight_bit(folder, 32)
    assert to_megatron(folder, tmp_path / "megatron", "--keep-extra") == 0
    assert verify(folder, tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 0
    assert_same_tensors(tensors(tmp_path / "back"), meant)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_a_changed_byte_is_found(models, tmp_path, capsys):
    assert to_megatron(models("qwen2"), tmp_path / "megatron") == 0
    checkpoint = read_checkpoint(tmp_path / "megatron" / "release")
    place = locate(checkpoint["output_layer.weight"].chunks[0])
    content = bytearray(place.file.read_bytes())
    content[place.offset + place.nbytes // 2 + 3] ^= 1
    place.file.write_bytes(content)
    assert verify(models("qwen2"), tmp_path / "megatron", "--logits") == 1
    said = capsys.readouterr().out
    assert "DIFFERENT  lm_head.weight: " in said
    assert "logits DIFFERENT" in said


def test_a_tensor_on_one_side_only_is_reported(models, tmp_path, capsys):
    critic = tmp_path / "critic"
    shutil.copytree(models("qwen2"), critic)
    (critic / "model.safetensors.index.json").unlink()
    (file,) = (f for f in critic.glob("*.safetensors") if "lm_head.weight" in load_file(f))
    stored = load_file(file)
    del stored["lm_head.weight"]
    save_file({**stored, "score.weight": torch.zeros(1, 64)}, file)
    assert to_megatron(critic, tmp_path / "megatron") == 0
    assert verify(critic, tmp_path / "megatron") == 0
    assert verify(models("qwen2"), tmp_path / "megatron") == 1
    said = capsys.readouterr().out
    assert "MISSING  lm_head.weight: not in the checkpoint" in said
    assert "MISSING  score.weight: not in the folder" in said


class Interrupted(Exception):
    """Raised in place of a kill."""


def test_an_interrupted_run_leaves_nothing_and_is_continued(models, tmp_path, monkeypatch):
    folder, out = models("qwen2_moe"), tmp_path / "megatron"
    run, done = Copier.run, []

    def stop_after(count):
        def counted(self, task):
            if len(done) == count:
                raise Interrupted
            done.append(task.name)
            run(self, task)

        return counted

    monkeypatch.setattr(job, "FLUSH_BYTES", 1)
    for count in (30, 45):
        monkeypatch.setattr(Copier, "run", stop_after(count))
        with pytest.raises(Interrupted):
            to_megatron(folder, out)
        assert not out.exists()
        with (tmp_path / ".megatron.partial" / "done.0.log").open("a") as journal:
            journal.write("3")  # an incomplete line, as after a kill
    monkeypatch.setattr(Copier, "run", stop_after(None))
    assert to_megatron(folder, out) == 0
    assert len(done) == len(set(done)) == 61
    assert verify(folder, out) == 0


def test_another_model_does_not_continue_an_interrupted_run(models, tmp_path, monkeypatch):
    folder, out = tmp_path / "hf", tmp_path / "megatron"
    shutil.copytree(models("llama"), folder)

    def full(descriptor, data, offset):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert to_megatron(folder, out) == 2
    begun = (tmp_path / ".megatron.partial" / job.FINGERPRINT).read_text()
    edited_config(folder, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert to_megatron(folder, out) == 2
    assert (tmp_path / ".megatron.partial" / job.FINGERPRINT).read_text() != begun


def test_processes_share_the_work(models, tmp_path):
    """The second of three commands under a real launcher."""
    folder, checkpoint = models("deepseek_v3"), ["--megatron", str(tmp_path / "megatron")]
    verify = ["verify", "--logits", "--hf", str(folder)]
    there, back = "hf-to-megatron", "megatron-to-hf"
    convert(tmp_path / there, there, "--hf", str(folder), *checkpoint)
    subprocess.run(
        [*mpirun(), "-m", "checkpoints_convert", *verify, *checkpoint],
        check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    convert(tmp_path / back, back, "--hf", str(tmp_path / "back"), *checkpoint)
    assert_same_tensors(tensors(tmp_path / "back"), tensors(folder))


def convert(outputs: Path, *command: str) -> None:
    """Run a command on two ranks."""
    run = LaunchedRun(outputs, program="checkpoints_convert.__main__", argv=command)
    assert run.codes() == [0, 0], run.texts()


def edited_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def cut_short(folder: Path) -> None:
    file = next(folder.glob("model-00001*"))
    file.write_bytes(file.read_bytes()[:1000])


def recast(dtype: torch.dtype, word: str):
    """Store the first matrix of that name in another dtype."""

    def spoil(folder: Path) -> None:
        for file in sorted(folder.glob("*.safetensors")):
            stored = load_file(file)
            for name in [n for n in stored if word in n][:1]:
                save_file({**stored, name: stored[name].to(dtype)}, file)
                return

    return spoil


def several_labels(folder: Path) -> None:
    save_file({"score.weight": torch.zeros(3, 64)}, folder / "score.safetensors")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["score.weight"] = "score.safetensors"
    file.write_text(json.dumps(index))


BAD = {
    "missing shard": (lambda f: next(f.glob("model-00002*")).unlink(), "not in the folder"),
    "truncated": (cut_short, "cut short"),
    "8-bit floats without scales": (recast(torch.float8_e4m3fn, "proj"), "_scale_inv"),
    "integers": (recast(torch.int8, "proj"), "stored as int8, but weights must be floats"),
    "one key of another dtype": (recast(torch.bfloat16, "k_proj"), "cast all of them: --dtype"),
    "more layers": (lambda f: edited_config(f, num_hidden_layers=5), "tensors are missing"),
    "fewer layers": (lambda f: edited_config(f, num_hidden_layers=3), "does not have"),
    "other width": (lambda f: edited_config(f, intermediate_size=80), "do not belong together"),
    "several labels": (several_labels, "num_labels=1"),
    "no such family": (lambda f: edited_config(f, model_type="gpt2"), "is not supported"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
    "no config": (lambda f: (f / "config.json").unlink(), "no such file"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "unreadable"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_reported_and_leaves_nothing(models, tmp_path, capsys, case):
    folder, out = tmp_path / "hf", tmp_path / "megatron"
    shutil.copytree(models("llama"), folder)
    spoil, message = BAD[case]
    spoil(folder)
    assert to_megatron(folder, out) == 2
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_full_disk_is_reported_before_writing(models, tmp_path, capsys, monkeypatch):
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


def test_bad_checkpoints_and_existing_outputs_are_reported(models, tmp_path, capsys):
    assert to_hf(tmp_path, tmp_path / "back") == 2
    assert "not a torch_dist checkpoint" in capsys.readouterr().err
    assert to_megatron(models("llama"), tmp_path / "megatron") == 0
    assert to_megatron(models("llama"), tmp_path / "megatron") == 2
    assert "already exists" in capsys.readouterr().err
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--config", str(models("qwen3"))) == 2
    assert "of another model" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "megatron" / "hf")
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 2
    assert "--config" in capsys.readouterr().err
    file = next((tmp_path / "megatron" / "release").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert verify(models("llama"), tmp_path / "megatron") == 2
    assert "cut short" in capsys.readouterr().err
    file.unlink()
    assert verify(models("llama"), tmp_path / "megatron") == 2
    assert "is missing" in capsys.readouterr().err
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("seven")
    assert verify(models("llama"), tmp_path / "megatron") == 2
    assert "names seven, which is not a checkpoint" in capsys.readouterr().err


def test_a_hole_in_a_checkpoint_is_reported(models, tmp_path, capsys):
    assert to_megatron(models("llama"), tmp_path / "megatron") == 0
    file = tmp_path / "megatron" / "release" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    file.write_bytes(pickle.dumps(metadata))
    assert verify(models("llama"), tmp_path / "megatron") == 2
    assert "linear_fc2.weight: its chunks hold 18432 of the 24576" in capsys.readouterr().err
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 2
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_that_would_run_code_is_refused(models, tmp_path, capsys):
    assert to_megatron(models("llama"), tmp_path / "megatron") == 0
    file = tmp_path / "megatron" / "release" / ".metadata"
    add_malicious_pickle(file, tmp_path / "done")
    capsys.readouterr()
    megatron = str(tmp_path / "megatron")
    for code in (
        to_hf(tmp_path / "megatron", tmp_path / "back"),
        verify(models("llama"), tmp_path / "megatron"),
        main(["inspect", megatron]),
    ):
        assert code == 2
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) == 3
    for line in reported:
        assert f"{file}: holds more than a checkpoint's metadata" in line
        assert "it names posix.mkdir; use a checkpoint from a source you trust" in line
    assert not (tmp_path / "done").exists()
    assert not (tmp_path / "back").exists()


def test_inspect_lists_a_folders_content(models, tmp_path, capsys):
    assert main(["inspect", str(models("llama"))]) == 0
    assert "model.norm.weight" in capsys.readouterr().out
    assert to_megatron(models("llama"), tmp_path / "megatron") == 0
    assert main(["inspect", str(tmp_path / "megatron")]) == 0
    assert "decoder.layers.self_attention.linear_qkv.weight" in capsys.readouterr().out
