"""Several sources mixed by weight."""

import json
from collections import Counter

import pytest

from mppo.batch.prompt import Prompt
from mppo.data.loader import PromptLoader, draws_per_epoch
from mppo.data.source import PromptSet, SourceShare, load_prompts
from mppo.hub.builtin import byte_tokenizer
from mppo.parallel.launch import LaunchInfo
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.sections.data import DataConfig
from mppo.report.opening import opening_lines
from mppo.rewards.response import Response
from mppo.rewards.rules import RuleReward

SIZES, WEIGHTS = (10, 40, 3), (1.0, 2.0, 1.0)


def mix(sizes=SIZES, weights=WEIGHTS):
    prompts = [
        Prompt(0, (1,), str(source), str(index), "")
        for source, size in enumerate(sizes)
        for index in range(size)
    ]
    shares = tuple(SourceShare(size, weight) for size, weight in zip(sizes, weights))
    return PromptSet(tuple(prompts), shares=shares)


def drawn(loader, count):
    """Source and number of each of the next prompts."""
    return [(int(each.data_source), int(each.ground_truth)) for each in loader.take(count)]


@pytest.mark.parametrize(
    ("sizes", "weights", "draws"),
    [
        ((10, 40, 3), (1, 2, 1), [13, 27, 13]),
        ((50, 50), (30, 70), [30, 70]),
        ((50, 50), (0.003, 0.007), [30, 70]),
        ((99, 1), (1e-9, 1), [1, 99]),
        ((1, 1, 1), (1, 1, 1e6), [1, 1, 1]),
        ((7,), (3,), [7]),
        ((), (), []),
    ],
)
def test_weights_are_normalised_and_no_source_is_lost(sizes, weights, draws):
    assert draws_per_epoch([SourceShare(*each) for each in zip(sizes, weights)]) == draws


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_source_has_its_share_and_repeats_when_it_is_used_up(shuffle):
    loader = PromptLoader(mix(), 8, shuffle, seed=0)
    tokens = drawn(loader, 53 * 40)
    assert Counter(source for source, _ in tokens) == {0: 13 * 40, 1: 27 * 40, 2: 13 * 40}
    for source, size in enumerate(SIZES):
        times = Counter(index for part, index in tokens if part == source)
        assert len(times) == size
        assert max(times.values()) - min(times.values()) <= 1
    assert loader.steps_per_epoch == 7


def test_without_shuffling_every_batch_has_the_shares():
    loader = PromptLoader(mix((60, 20), (1, 3)), 8, False, seed=0)
    for _ in range(10):
        assert Counter(source for source, _ in drawn(loader, 8)) == {0: 2, 1: 6}


def test_the_order_depends_on_the_seed_alone():
    orders = [drawn(PromptLoader(mix(), 8, True, seed), 200) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_a_resumed_mix_continues_at_every_position():
    whole = drawn(PromptLoader(mix(), 8, True, seed=0), 160)
    for position in (0, 1, 52, 53, 54, 120):
        first, second = (PromptLoader(mix(), 8, True, seed=0) for _ in range(2))
        first.take(position)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert drawn(second, 160 - position) == whole[position:]


def test_a_position_in_another_mix_is_refused():
    state = PromptLoader(mix(), 8, True, 0).state_dict()
    for other in (mix(weights=(1, 1, 1)), mix(sizes=(40, 10, 3)), PromptSet(mix().prompts)):
        with pytest.raises(ValueError, match="resume with the same data section"):
            PromptLoader(other, 8, True, 0).load_state_dict(state)


def test_a_position_saved_before_there_were_mixes_is_read():
    state = {"position": 60, "returned": [], "seed": 0, "num_prompts": 53}
    loader = PromptLoader(PromptSet(mix().prompts), 8, True, 0)
    loader.load_state_dict(state)
    assert loader.position == 60
    with pytest.raises(ValueError, match="prompts_and_draws = None"):
        PromptLoader(mix(), 8, True, 0).load_state_dict(state)


def test_each_source_has_its_own_columns_system_prompt_and_verifier(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"q": "1+2=", "a": "3"}\n' * 5)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
data:
  system_prompt: Answer.
  sources:
    - {{train_files: {path}, val_files: [{path}], weight: 3, name: sums, prompt_key: q,
       answer_key: a, system_prompt: Add., verifier: gsm8k, train_size: 4}}
    - {{task: arithmetic, train_size: 12, val_size: 2}}
    - {{task: reverse, train_size: 1, val_size: 0, system_prompt: "", verifier: final_answer}}
""")
    data = load_recipe(recipe).data
    found = load_prompts(data, byte_tokenizer(), "train")
    assert found.summary() == "17 (sums 4, arithmetic 12, reverse 1)"
    assert found.shares == (SourceShare(4, 3.0), SourceShare(12, 1.0), SourceShare(1, 1.0))
    assert [prompt.uid for prompt in found.prompts] == list(range(17))
    first, second, last = (found.prompts[index] for index in (0, 4, 16))
    assert first.text == "<bos>Add.\n1+2=\n"
    assert (second.text[:13], last.text[:13]) == ("<bos>Answer.\n", "<bos>reverse ")
    assert [first.verifier, second.verifier, last.verifier] == ["gsm8k", None, "final_answer"]
    validation = load_prompts(data, byte_tokenizer(), "val")
    assert validation.summary() == "7 (sums 5, arithmetic 2)"
    assert validation.shares == ()
    reward = RuleReward(verifier="exact")
    reward.check(found.prompts)
    answers = [Response(first, "so #### 3"), Response(second, "so #### " + second.ground_truth)]
    assert reward(answers) == [1.0, 0.0]


def test_one_source_is_the_data_section_itself():
    plain = DataConfig(task="arithmetic", train_size=9, system_prompt="Add.", seed=3)
    mixed = DataConfig(
        sources=({"task": "arithmetic"},), train_size=9, system_prompt="Add.", seed=3
    )
    assert (
        load_prompts(plain, byte_tokenizer(), "train").prompts
        == load_prompts(mixed, byte_tokenizer(), "train").prompts
    )


def test_an_unknown_verifier_of_a_source_is_named():
    prompt = Prompt(0, (1,), "arithmetic", "3", "", verifier="exct")
    with pytest.raises(ConfigError, match=r"data.sources.\*.verifier = 'exct'\n.*\n.*'exact'"):
        RuleReward().check([prompt])


def test_the_start_of_a_run_names_the_shares():
    sources = "data.sources=[{task: reverse, weight: 3}, {train_files: [a.json], weight: 1}]"
    lines = opening_lines(
        load_recipe(None, [sources]), LaunchInfo(0, 1, 0, 1, "127.0.0.1", 1, "torchrun")
    )
    assert "data: 75.0% task reverse; 25.0% a.json; validation: none" in lines
