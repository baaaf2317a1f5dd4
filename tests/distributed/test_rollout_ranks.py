"""The number of ranks does not change the generated responses."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import start_ranks

from mppo.agents.conversation import Conversation, Reply
from mppo.agents.engine import ConversationEngine
from mppo.agents.turn_text import TurnText
from mppo.batch import Prompt, Trajectory
from mppo.config.sections.rollout import SamplingConfig
from mppo.hub.builtin import byte_tokenizer
from mppo.parallel.collectives import all_gather_varlen
from mppo.parallel.partition import partition
from mppo.response_moves import bring_ids, bring_ids_to_first, bring_responses
from mppo.responses import ResponseRow, Responses, concatenate_responses
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.local.engine import LocalEngine
from mppo.rollout.response_gather import gather_rows, left_over
from mppo.rollout.sglang.answers import take_up

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
}


def _everywhere(responses: Responses, world: int) -> list[Trajectory]:
    if world == 1:
        return responses.trajectories
    return list(bring_responses(responses, [range(len(responses))] * world).values())


def _agent(conversations: Sequence[Conversation]) -> list[Reply]:
    """Says something after every turn, and gives a reward for the last one."""
    return [Reply("!!", float(each.is_last)) for each in conversations]


def _generate(rank: int, world: int, prompts: list[Prompt]) -> tuple[list, list]:
    config = transformers.Qwen2Config(**CONFIG)
    torch.manual_seed(0)
    source = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    engine = LocalEngine("none", config, torch.float32, rank=rank, world=world)
    engine.update_weights([list(source.state_dict().items())], 3)
    sampling = SamplingConfig(n=2, stop_token_ids=(5, 6, 7, 8))
    responses = engine.generate(GenerationRequest(prompts, sampling, 10, seed=11))
    assert {row.home for row in responses.table} == set(range(min(world, len(prompts))))
    assert [i for i, row in responses.rows.items() if row.home == rank] == list(responses.held)
    trajectories = _everywhere(responses, world)
    assert [row.length for row in responses.table] == [len(t.response_ids) for t in trajectories]
    talking = ConversationEngine(engine, _agent, "test", TurnText(byte_tokenizer()), 3, world=world)
    conversations = talking.generate(GenerationRequest(prompts, sampling, 16, seed=11))
    assert [i for i, row in conversations.rows.items() if row.home == rank] == list(
        conversations.held
    )
    assert {each.episode.reward for each in conversations.trajectories} <= {0.0, 1.0}
    assert max(row.turns for row in conversations.table) > 1
    trajectories += [replace(each, episode=None) for each in _everywhere(conversations, world)]
    return trajectories, engine.logprobs([t.response_ids.tolist() for t in trajectories])


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(i, tuple(range(3, 4 + (i * 7) % 13)), "t", "", "") for i in range(count)]


def _made(index: int) -> Trajectory:
    """A response in two parts, some without tokens and some with routed experts."""
    length = index % 4
    experts = torch.full((length + 1, 3, 1), index, dtype=torch.int16) if index % 3 else None
    return Trajectory(
        Prompt(index, (1, 2), "t", "", ""),
        [index] * length,
        [-float(index)] * length,
        "stop",
        5,
        experts,
        ((4, 1),) if length > 1 else (),
    )


def _exchange(rank: int, world: int) -> None:
    """What ranks know of each other's responses, and the responses where all need them."""
    made = [_made(index) for index in range(7)]
    prompts = [each.prompt for each in made]
    request = GenerationRequest(prompts, SamplingConfig(), 10, seed=0)
    mine = {index: each for index, each in enumerate(made) if index * index % world == rank}
    rows = gather_rows(mine, request, world, None)
    expected = {i: ResponseRow.of(each, i * i % world) for i, each in enumerate(made)}
    assert rows == expected
    responses = Responses(rows, mine).select(range(7))
    assert _everywhere(responses, world) == made
    backwards = responses.select(range(6, -1, -1))
    assert _everywhere(concatenate_responses([backwards, responses]), world) == made[::-1] + made
    ids = [each.response_ids.tolist() for each in made]
    assert [each.tolist() for each in bring_ids_to_first(responses)] == ([] if rank else ids)
    some = [[(3 * receiver + i) % 7 for i in range(4)] for receiver in range(world)]
    found = {number: each.tolist() for number, each in bring_ids(responses, some).items()}
    assert list(found.items()) == [(number, ids[number]) for number in some[rank]]
    left = left_over(request, responses, taken=[1, 2])
    assert list(left.rows) == [(i, 0) for i in (3, 5, 6)], "without empty responses"
    assert left.held == {(i, 0): each for i, each in mine.items() if i in (3, 5, 6)}
    _take_up(rank, world, responses)
    spoiled = {i: replace(t, logprobs=t.logprobs * float("nan")) for i, t in mine.items() if i == 6}
    with pytest.raises(ValueError, match=r"nan in the response to prompt 6: .*version 5"):
        gather_rows(mine | spoiled, request, world, None)


def _take_up(rank: int, world: int, finished: Responses) -> None:
    """Finished responses stay at home; the others move to the ranks that continue them."""
    rows = {
        i: replace(row, finish_reason="abort" if i % 2 else "stop")
        for i, row in finished.rows.items()
    }
    held = {
        i: replace(each, finish_reason=rows[i].finish_reason) for i, each in finished.held.items()
    }
    homes = {i: (row.home + 1) % world for i, row in rows.items()}
    taken = take_up(Responses(rows, held), [1, 2, 3, 6], homes, world, None)
    assert list(taken.rows) == [1, 2, 3, 6]
    for i, row in taken.rows.items():
        assert row == (replace(rows[i], home=homes[i]) if i % 2 else rows[i])
        assert (i in taken.held) == (row.home == rank)
        if i in taken.held:
            expected = replace(_made(i), finish_reason=row.finish_reason)
            assert taken.held[i] == expected


def _worker(rank: int, world: int, store: str, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    try:
        mine = _generate(rank, world, _prompts(count))
        alone = _generate(0, 1, _prompts(count))
        assert [t.finish_reason for t in mine[0]] == [t.finish_reason for t in alone[0]]
        assert {len(t.response_ids) for t in mine[0]} != {10}
        for here, there in zip(mine[0], alone[0], strict=True):
            assert here.prompt == there.prompt
            assert here.response_ids.tolist() == there.response_ids.tolist()
            assert here.logprobs.tolist() == pytest.approx(there.logprobs.tolist(), abs=1e-5)
        for here, there in zip(mine[1], alone[1], strict=True):
            assert here == pytest.approx(there, abs=1e-5)
        _exchange(rank, world)
        lengths = [len(t) for t in all_gather_varlen(torch.arange(rank), world)]
        assert lengths == list(range(world))
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "count"), [(2, 9), (3, 2)])
def test_any_number_of_ranks_generates_the_same(tmp_path, world: int, count: int) -> None:
    start_ranks(_worker, (world, str(tmp_path / "store"), count), world)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shares_are_disjoint_complete_and_balanced(world: int) -> None:
    lengths = [(i * 37) % 101 for i in range(50)]
    dealt = partition(lengths, world, equal_count=True)
    assert sorted(i for share in dealt for i in share) == list(range(50))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    loads = [sum(lengths[i] for i in share) for share in dealt]
    assert max(loads) - min(loads) <= max(lengths)
