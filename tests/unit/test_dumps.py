"""Dumps that are damaged or hostile are refused with their folder and a reason."""

from __future__ import annotations

import json

import pytest
from random_dump import write_dump
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mppo.dumps.inspection import main as inspect
from mppo.dumps.step_dump import dumped_steps, read_header_of, recipe_hash
from mppo.trainer.dump import read_responses


def test_inspect_shows_pieces_and_numbers(tmp_path, capsys):
    write_dump(tmp_path, 7)
    for place in (tmp_path, tmp_path / "rollouts", tmp_path / "rollouts/step_7"):
        assert inspect([str(place), "--sequence", "1"]) == 0
        assert "step 7, sequence 1: score 0, stop" in capsys.readouterr().out
        assert inspect([str(place), "--sequence", "0"]) == 0
        text = capsys.readouterr().out
        assert "advantage" in text
        assert "ab3" in text
        assert "ab4" not in text, "the other sequence's"


def change_tensor(name, change):
    def apply(folder):
        path = folder / "rank_0.safetensors"
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            about = file.metadata()
        tensors[name] = change(tensors[name])
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, about)

    return apply


def change_header(key, value):
    def apply(folder):
        path = folder / "step.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return apply


def no_metadata(folder):
    path = folder / "rank_0.safetensors"
    save_file(load_file(path), path)


def cut(name):
    def apply(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return apply


DAMAGES = [
    ("half of the tensors", cut("rank_0.safetensors")),
    ("half of the header", cut("step.json")),
    ("half of the pieces", cut("rank_0.json")),
    ("no metadata", no_metadata),
    ("a billion ranks", change_header("ranks", 10**9)),
    ("ranks that are text", change_header("ranks", "many")),
    ("another format", change_header("format", 2)),
    ("an unknown field", change_header("more", 1)),
    ("rows that are numbers", change_header("rows", [1, 2])),
    ("fewer tokens", change_tensor("advantages_T", lambda x: x[:2])),
    ("ends beyond the tokens", change_tensor("batch.cu_seqlens", lambda x: x * 1000)),
    ("ends that run backwards", change_tensor("batch.cu_seqlens", lambda x: -x)),
    ("a sequence that nobody holds", change_tensor("batch.held_H", lambda x: x + 5)),
    ("ends that are a number", change_tensor("batch.cu_seqlens", lambda x: x[0])),
    ("lengths of another batch", change_tensor("batch.lengths_B", lambda x: x[:0])),
]


@pytest.mark.parametrize("damage", [row[1] for row in DAMAGES], ids=[row[0] for row in DAMAGES])
def test_a_damaged_dump_is_refused(damage, tmp_path, capsys):
    folder = write_dump(tmp_path, 1)
    damage(folder)
    assert inspect([str(tmp_path), "--sequence", "1"]) == 2
    message = capsys.readouterr().err
    assert f"mppo: {folder}: the dump cannot be read: " in message
    assert "Traceback" not in message


def test_folders_without_a_header_are_incomplete(tmp_path, capsys):
    (write_dump(tmp_path, 1) / "step.json").unlink()
    assert dumped_steps(tmp_path) == {}
    with pytest.raises(SystemExit, match="2"):
        inspect([str(tmp_path)])
    assert "holds no dumped step" in capsys.readouterr().err
    (tmp_path / "rollouts/step_2.old-1").mkdir()
    write_dump(tmp_path, 3)
    assert list(dumped_steps(tmp_path)) == [3]


def test_numbers_with_the_name_of_a_secret_stay_numbers(tmp_path):
    header = read_header_of(write_dump(tmp_path, 1, numbers={"pass": 1.0}))
    assert [row.numbers for row in header.rows] == [{"pass": 1.0}] * 2


@pytest.mark.parametrize(("experts", "routed"), [((3, 2), (3, 2)), ((0, 0), None)])
def test_every_row_of_a_dump_knows_the_shape_of_the_engines_choices(tmp_path, experts, routed):
    folder = write_dump(tmp_path, 1, experts=experts)
    responses, _ = read_responses(folder, read_header_of(folder))
    assert [row.routed and row.routed[1:] for row in responses.table] == [routed] * 2


def test_the_hash_of_a_recipe_does_not_depend_on_its_secrets():
    one = {"reward": {"kwargs": {"api_key": "open5esame7cave"}}, "seed": 1}
    two = {"seed": 1, "reward": {"kwargs": {"api_key": "another8secret"}}}
    assert recipe_hash(one) == recipe_hash(two) != recipe_hash({**one, "seed": 2})
    assert len(recipe_hash(one)) == 64
