"""The number of ranks does not change the generated responses."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import transformers
from agent_case import answered
from ranks import start_ranks

from mppo.agents.conversation import Conversation, Reply
from mppo.batch.episode import Episode, EpisodeTokens
from mppo.batch.prompt import Prompt
from mppo.batch.shares import bring_episodes, bring_ids, bring_ids_to_first
from mppo.parallel.collectives import all_gather_varlen
from mppo.parallel.partition import partition
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.local.local_engine import LocalEngine
from mppo.rollout.response_gather import gather_episodes, left_over
from mppo.rollout.sglang.generation import take_up

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
}


def _everywhere(episodes: list[Episode], world: int) -> list[Episode]:
    if world == 1:
        return episodes
    return list(bring_episodes(episodes, [range(len(episodes))] * world).values())


def _places_held(episodes: list[Episode]) -> list[int]:
    return [place for place, each in enumerate(episodes) if each.tokens is not None]


def _agent(conversation: Conversation) -> Reply:
    """Says something after every turn, and gives a reward for the last one."""
    return Reply("!!", float(conversation.is_last))


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
    generated = engine.generate(GenerationRequest(prompts, sampling, 10, seed=11))
    assert {each.home for each in generated} == set(range(min(world, len(prompts))))
    assert [i for i, each in enumerate(generated) if each.home == rank] == _places_held(generated)
    episodes = _everywhere(generated, world)
    assert [each.length for each in generated] == [len(each.here.ids) for each in episodes]
    talking = answered(engine, _agent, 3, 16, rank=rank, world=world)
    conversations = talking.generate(GenerationRequest(prompts, sampling, 16, seed=11))
    talking.stop()
    mine = _places_held(conversations)
    assert [i for i, each in enumerate(conversations) if each.home == rank] == mine
    assert {conversations[i].result.reward for i in mine} <= {0.0, 1.0}
    assert all(each.result is None for each in conversations if each.home != rank)
    assert max(each.turns for each in conversations) > 1
    episodes = episodes + [replace(each, result=None) for each in _everywhere(conversations, world)]
    return episodes, engine.logprobs([each.here.ids.tolist() for each in episodes])


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(i, tuple(range(3, 4 + (i * 7) % 13)), "t", "", "") for i in range(count)]


def _made(index: int) -> Episode:
    """A response in two parts, some without tokens and some with routed experts."""
    length = index % 4
    experts = torch.full((length + 1, 3, 1), index, dtype=torch.int16) if index % 3 else None
    return Episode.sampled(
        Prompt(index, (1, 2), "t", "", ""),
        EpisodeTokens([index] * length, [-float(index)] * length, experts),
        "stop",
        5,
        ((4, 1),) if length > 1 else (),
    )


def _exchange(rank: int, world: int) -> None:
    """What ranks know of each other's responses, and the responses where all need them."""
    made = [_made(index) for index in range(7)]
    prompts = [each.prompt for each in made]
    request = GenerationRequest(prompts, SamplingConfig(), 10, seed=0)
    mine = {index: each for index, each in enumerate(made) if index * index % world == rank}
    found = gather_episodes(mine, request, world)
    episodes = [found.pop(index) for index in range(7)]
    assert not found
    for index, each in enumerate(episodes):
        home = index * index % world
        here = replace(made[index], home=home)
        assert each == (here if home == rank else here.elsewhere(home))
    _exchange_sequences(rank, world, request)
    brought = [replace(each, home=rank) for each in made]
    assert _everywhere(episodes, world) == brought
    assert _everywhere(episodes[::-1] + episodes, world) == brought[::-1] + brought
    ids = [each.here.ids.tolist() for each in made]
    assert [each.tolist() for each in bring_ids_to_first(episodes)] == ([] if rank else ids)
    some = [[(3 * receiver + i) % 7 for i in range(4)] for receiver in range(world)]
    came = {number: each.tolist() for number, each in bring_ids(episodes, some).items()}
    assert list(came.items()) == [(number, ids[number]) for number in some[rank]]
    left = left_over(request, dict(enumerate(episodes)), taken=[1, 2])
    assert list(left) == [(i, 0) for i in (3, 5, 6)], "without empty responses"
    assert left == {(i, 0): episodes[i] for i in (3, 5, 6)}
    _take_up(rank, world, episodes)
    spoiled = {}
    if 6 in mine:
        tokens = mine[6].here
        tokens = replace(tokens, logprobs=tokens.logprobs * float("nan"))
        spoiled[6] = replace(mine[6], tokens=tokens)
    with pytest.raises(ValueError, match=r"nan in the response to prompt 6: .*version 5"):
        gather_episodes(mine | spoiled, request, world)


def _exchange_sequences(rank: int, world: int, request: GenerationRequest) -> None:
    """What ranks know of an episode of several sequences: all but their tokens."""
    other = replace(_made(5).prompt, token_ids=torch.tensor([8, 9, 7], dtype=torch.int32))
    earlier = replace(_made(5), prompt=other), _made(3)
    whole = replace(_made(5), earlier=(earlier[0], replace(earlier[1], prompt=_made(5).prompt)))
    last = world - 1
    found = gather_episodes({5: whole} if rank == last else {}, request, world)[5]
    if rank == last:
        assert found == whole.moved(last)
        assert {each.home for each in found.sequences} == {last}
        return
    unknown = replace(other, token_ids=torch.zeros(3, dtype=torch.int32))
    first, second = (each.elsewhere(last) for each in whole.earlier)
    known = replace(whole.elsewhere(last), earlier=(replace(first, prompt=unknown), second))
    assert found == known


def _take_up(rank: int, world: int, finished: list[Episode]) -> None:
    """Finished responses stay at home; the others move to the ranks that continue them."""
    begun = {
        i: replace(each, finish_reason="abort" if i % 2 else "stop")
        for i, each in enumerate(finished)
    }
    homes = {i: (each.home + 1) % world for i, each in begun.items()}
    taken = take_up(begun, [1, 2, 3, 6], homes, world)
    assert list(taken) == [1, 2, 3, 6]
    for i, each in taken.items():
        home = homes[i] if i % 2 else begun[i].home
        here = replace(_made(i), finish_reason=begun[i].finish_reason, home=home)
        assert each == (here if home == rank else here.elsewhere(home))


def _worker(rank: int, world: int, store: str, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    try:
        mine = _generate(rank, world, _prompts(count))
        alone = _generate(0, 1, _prompts(count))
        assert [each.finish_reason for each in mine[0]] == [each.finish_reason for each in alone[0]]
        assert {len(each.here.ids) for each in mine[0]} != {10}
        for here, there in zip(mine[0], alone[0], strict=True):
            assert here.prompt == there.prompt
            assert here.here.ids.tolist() == there.here.ids.tolist()
            assert here.here.logprobs.tolist() == pytest.approx(
                there.here.logprobs.tolist(), abs=1e-5
            )
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
