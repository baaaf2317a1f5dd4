"""The number of ranks does not change the generated responses."""

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import start_ranks

from mppo.batch import Prompt
from mppo.config.sections.rollout import SamplingConfig
from mppo.parallel.collectives import all_gather_varlen
from mppo.parallel.partition import partition
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.local.engine import LocalEngine

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
}


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
    trajectories = engine.generate(GenerationRequest(prompts, sampling, 10, seed=11))
    return trajectories, engine.logprobs([t.response_ids.tolist() for t in trajectories])


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(i, tuple(range(3, 4 + (i * 7) % 13)), "t", "", "") for i in range(count)]


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
