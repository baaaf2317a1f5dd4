"""The order of prompts."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mppo.batch.prompt import Prompt
from mppo.data.loader import PromptLoader, check_batch_size
from mppo.data.source import PromptSet, load_prompts
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.data import DataConfig


def prompt_set(size):
    return PromptSet(tuple(Prompt(index, (index,), "x", "", str(index)) for index in range(size)))


def rows(batch):
    return [prompt.token_ids[0].item() for prompt in batch]


@pytest.mark.parametrize("size", [5, 6, 7, 3])
def test_every_epoch_holds_every_prompt_once(size):
    loader = PromptLoader(prompt_set(size), batch_size=3, shuffle=True, seed=0)
    drawn = [row for _ in range(4 * size) for row in rows(next(loader))]
    epochs = [drawn[start : start + size] for start in range(0, len(drawn), size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_without_shuffling_the_order_is_the_sets():
    loader = PromptLoader(prompt_set(4), batch_size=3, shuffle=False, seed=0)
    assert [rows(next(loader)) for _ in range(3)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]


def test_uids_are_positions_in_the_run():
    loader = PromptLoader(prompt_set(2), batch_size=3, shuffle=True, seed=0)
    assert [prompt.uid for _ in range(2) for prompt in next(loader)] == list(range(6))


def test_order_depends_on_the_seed():
    orders = [rows(next(PromptLoader(prompt_set(50), 50, True, seed))) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_a_resumed_loader_goes_on_where_the_first_stood():
    first = PromptLoader(prompt_set(7), batch_size=3, shuffle=True, seed=0)
    for _ in range(4):
        next(first)
    second = PromptLoader(prompt_set(7), batch_size=3, shuffle=True, seed=0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.epoch == first.epoch == 12 / 7
    assert [next(first) for _ in range(5)] == [next(second) for _ in range(5)]


def test_a_position_in_other_data_is_refused():
    state = PromptLoader(prompt_set(7), 3, True, 0).state_dict()
    with pytest.raises(ValueError, match="num_prompts = 7, this run has 8"):
        PromptLoader(prompt_set(8), 3, True, 0).load_state_dict(state)
    with pytest.raises(ValueError, match="seed = 0, this run has 1"):
        PromptLoader(prompt_set(7), 3, True, 1).load_state_dict(state)


ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(5)]
CHANGED = {
    "reversed": ROWS[::-1],
    "an edited prompt": [*ROWS[:4], {**ROWS[4], "prompt": "9+1="}],
    "an edited answer": [{**ROWS[0], "answer": "2"}, *ROWS[1:]],
    "an edited column": [{**ROWS[0], "level": 9}, *ROWS[1:]],
    "other rows": [{"prompt": f"{n}*2=", "answer": "x", "level": n} for n in range(5)],
    "text moved to the next column": [{**ROWS[0], "prompt": "0+1=1", "answer": ""}, *ROWS[1:]],
}


def loader_of(folder: Path, rows: list, any_content: bool = False) -> PromptLoader:
    folder.mkdir()
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train_files=(str(file),), apply_chat_template=False)
    prompts = load_prompts(data, load_tokenizer(resolve_model("builtin:tiny")), "train")
    return PromptLoader(prompts, 2, True, 0, any_content)


@pytest.mark.parametrize("how", CHANGED)
def test_a_position_in_changed_rows_of_the_same_number_is_refused(how, tmp_path):
    saved = json.loads(json.dumps(loader_of(tmp_path / "a", ROWS).state_dict()))
    loader_of(tmp_path / "moved", ROWS).load_state_dict(saved)
    with pytest.raises(ConfigError) as caught:
        loader_of(tmp_path / "b", CHANGED[how]).load_state_dict(saved)
    (issue,) = caught.value.issues
    assert (issue.key, issue.value) == ("data.train_files", [str(tmp_path / "b/rows.jsonl")])
    assert "not those that the checkpoint was trained on" in issue.why
    assert "trainer.on_changed_data=accept" in issue.fix


def test_changed_rows_can_be_accepted_and_older_checkpoints_have_no_digest(tmp_path):
    first = loader_of(tmp_path / "a", ROWS)
    next(first)
    accepting = loader_of(tmp_path / "b", CHANGED["reversed"], any_content=True)
    accepting.load_state_dict(first.state_dict())
    assert accepting.position == 2
    assert accepting.state_dict()["contents"] != first.state_dict()["contents"]
    older = {k: v for k, v in first.state_dict().items() if k != "contents"}
    loader_of(tmp_path / "c", CHANGED["reversed"]).load_state_dict(older)


def test_a_digest_is_the_same_in_every_process():
    """Extra values of a task may be sets and objects, whose order and address differ."""
    script = (
        "from mppo.data.content import content_of\nfrom mppo.data.rows import DataRow\n"
        "extra = {'a': {'x', 'y', 'z', 'w'}, 'b': object(), 'c': b'x', 1: [None, float('nan')]}\n"
        "print(content_of('', '', [DataRow('p', 'a', 's', extra)]).digest)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(found) == 1


def test_steps_per_epoch_rounds_up():
    assert PromptLoader(prompt_set(7), 3, True, 0).steps_per_epoch == 3


def test_no_prompt_or_no_batch_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptLoader(prompt_set(0), 3, True, 0)
    with pytest.raises(ValueError, match="batch_size 0"):
        PromptLoader(prompt_set(3), 0, True, 0)


def test_prompts_given_back_come_first_and_survive_a_resume():
    loader = PromptLoader(prompt_set(9), batch_size=3, shuffle=False, seed=0)
    requested = loader.take(5)
    loader.give_back([requested[1], requested[4]])
    again = PromptLoader(prompt_set(9), batch_size=3, shuffle=False, seed=0)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for each in (loader, again):
        assert rows(each.take(3)) == [1, 4, 5]
        assert rows(next(each)) == [6, 7, 8]


def test_a_look_at_the_next_prompts_draws_none():
    loader = PromptLoader(prompt_set(5), batch_size=3, shuffle=True, seed=0)
    loader.give_back(loader.take(3)[:1])
    before = loader.state_dict()
    seen = loader.peek(4)
    assert loader.state_dict() == before
    assert loader.take(4) == seen
    assert [prompt.uid for prompt in seen] == [0, 3, 4, 5]


def test_a_batch_that_would_repeat_prompts_is_refused():
    few = replace(prompt_set(7), filtered=2)
    check_batch_size(few, 7)
    with pytest.raises(ConfigError) as refused:
        check_batch_size(few, 8)
    (issue,) = refused.value.issues
    assert (issue.key, issue.value) == ("data.train_batch_size", 8)
    assert few.summary() in issue.why
    assert issue.fix.endswith("at most 7")
