"""Dumps that are damaged or hostile are refused with their folder and a reason."""

from __future__ import annotations

import json
import math

import pytest
from random_dump import write_dump
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mppo.dumps.inspection import main as inspect
from mppo.dumps.step_dump import dumped_steps, read_header_of, recipe_hash
from mppo.report.html.program import main as report
from mppo.trainer.dump import read_episodes


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


def drop_tensor(name):
    def apply(folder):
        path = folder / "rank_0.safetensors"
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            about = file.metadata()
        del tensors[name]
        save_file(tensors, path, about)

    return apply


def change_metadata(text):
    def apply(folder):
        path = folder / "rank_0.safetensors"
        save_file(load_file(path), path, {"experience": text})

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
    ("tokens that are real numbers", change_tensor("batch.tokens_T", lambda x: x / 2)),
    ("lengths that are not numbers", change_tensor("batch.lengths_B", lambda x: x / 0)),
    ("scores without a row", change_tensor("batch.scores_B", lambda x: x[0])),
    ("log-probabilities that are words", change_tensor("old.logprobs_T", lambda x: x.long())),
    ("ends of the largest numbers", change_tensor("batch.cu_seqlens", lambda x: x + (2**63 - 9))),
    ("no log-probabilities", drop_tensor("old.logprobs_T")),
    ("no ends", drop_tensor("batch.cu_seqlens")),
    ("no homes", drop_tensor("batch.home_B")),
    ("a header that is a list", change_metadata("[]")),
    ("a header of numbers", change_metadata('{"layers": 3, "actor": 1}')),
    ("a header that is deep", change_metadata("[" * 5000)),
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


HEADERS = [
    ("step", -1), ("step", "1"), ("step", 1e300), ("recipe", None), ("recipe", 3), ("ranks", 0),
    ("ranks", 1.5), ("ranks", True), ("kl_coef", math.nan), ("kl_coef", "0"), ("rows", {}),
    ("rows.0.uid", 10**30), ("rows.0.uid", None), ("rows.1.data_source", ["a"]),
    ("rows.1.prompt", None), ("rows.1.prompt", 5), ("rows.1.ground_truth", {}),
    ("rows.1.finish_reason", 1), ("rows.1.parts", []), ("rows.1.parts", [[1]]),
    ("rows.1.parts", [[0, -1]]), ("rows.1.parts", [[0, 1e9]]), ("rows.1.parts", [[0, 10**12]]),
    ("rows.1.parts", 3), ("rows.1.score", math.nan), ("rows.1.score", math.inf),
    ("rows.1.score", "1"), ("rows.1.score", 10**400), ("rows.1.score", None),
    ("rows.1.numbers", []), ("rows.1.numbers", {"a": "b"}), ("rows.1.baseline", -math.inf),
    ("rows.1.token_total", math.nan), ("rows.1.error", 1), ("rows.1.answer", []),
    ("rows.1.right", "yes"), ("rows.1.more", 1),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), HEADERS, ids=[f"{k}={v}"[:40] for k, v in HEADERS])
def test_a_wrong_entry_of_a_header_is_named_with_its_file_and_value(key, value, tmp_path, capsys):
    folder = write_dump(tmp_path, 1)
    path = folder / "step.json"
    content = json.loads(path.read_text())
    *parts, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    part = content
    for name in parts:
        part = part[name]
    part[last] = value
    path.write_text(json.dumps(content))
    for more in ([], ["--sequence", "1"]):
        assert inspect([str(tmp_path), *more]) == 2
        message = capsys.readouterr().err
        assert f"{path}: " in message
        assert key in message or "4300" in message
        assert len(message.splitlines()) == 1
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert report([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "the dump cannot be read" in page


def test_the_largest_numbers_of_a_dump_and_of_metrics_are_shown(tmp_path):
    folder = write_dump(tmp_path, 1)
    change_tensor("returns_T", lambda x: (x.double() + 1) * 1.7976931348623157e308)(folder)
    change_tensor("old.values_T", lambda x: x / 0)(folder)
    assert inspect([str(tmp_path), "--sequence", "1"]) == 0
    line = '{"step": 1, "critic/score/mean": 1.7976931348623157e308, "actor/lr": Infinity}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    (tmp_path / "status.json").write_text('{"status": [], "step": "x", "total_steps": NaN}')
    assert report([str(tmp_path)]) == 0


def test_a_recipe_whose_aliases_expand_without_end_is_left_out_of_the_report(tmp_path):
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}, z: *a{i - 1}}}" for i in range(1, 30)]
    (tmp_path / "recipe.yaml").write_text("\n".join(lines))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert report([str(tmp_path)]) == 0


def test_a_step_of_many_sequences_is_shown_in_parts(tmp_path, capsys):
    path = write_dump(tmp_path, 1) / "step.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "rows": content["rows"] * 5_000}))
    assert inspect([str(tmp_path), "--rows", "20"]) == 0
    shown = capsys.readouterr()
    assert "10000 rows; add --first 20 to see the next" in shown.err
    numbers = [line.split()[1] for line in shown.out.splitlines() if line.startswith("│")]
    assert numbers == [str(number) for number in range(20)]
    for wrong in (["--rows", "0"], ["--first", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            inspect([str(tmp_path), *wrong])
        assert "rows count from 0, show 1 or more" in capsys.readouterr().err
    assert inspect([str(tmp_path), "--first", "9990"]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert "9999" in shown.out
    assert "9989" not in shown.out
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert report([str(tmp_path)]) == 0


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
    episodes = read_episodes(folder, read_header_of(folder))
    assert [each.routed and each.routed[1:] for each in episodes] == [routed] * 2


def test_the_hash_of_a_recipe_does_not_depend_on_its_secrets():
    one = {"reward": {"kwargs": {"api_key": "open5esame7cave"}}, "seed": 1}
    two = {"seed": 1, "reward": {"kwargs": {"api_key": "another8secret"}}}
    assert recipe_hash(one) == recipe_hash(two) != recipe_hash({**one, "seed": 2})
    assert len(recipe_hash(one)) == 64
