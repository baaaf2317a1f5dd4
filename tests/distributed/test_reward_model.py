"""A reward model gives transformers' scores, in every family and layout."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from hf_families import VOCAB, save_reward_model
from ranks import start_ranks

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP = "expert_model_parallel_size"
LAYOUTS = {
    "TP2": {TP: 2},
    "TP2 without SP": {TP: 2, "sequence_parallel": False},
    "PP2": {PP: 2},
    "CP2": {CP: 2},
    "EP2": {EP: 2},
    "DP2": {},
}
EVERYWHERE = ("TP2", "PP2", "CP2")
DENSE = ("llama", "mistral", "qwen2_tied", "qwen2_window", "qwen3", "gemma", "gemma2", "gpt_neox",
         "opt", "glm4")  # fmt: skip
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "moonlight", "deepseek_v3")
CASES = [
    *((family, layout) for family in (*DENSE, *EXPERTS) for layout in EVERYWHERE),
    *(("llama", layout) for layout in ("TP2 without SP", "DP2")),
    *(("mixtral", "EP2"), ("moonlight", "EP2")),
]
PLAIN = {"rope_theta": 1e4, "rope_type": "default"}
CHANGED = {"deepseek_v2": {"rope_parameters": PLAIN}}
"""Changed settings: transformers leaves YaRN's factor out of DeepSeek-V2's attention."""
LENGTHS = (5, 17, 1, 12, 9)
"""Odd in number: a data-parallel rank has a micro-batch more; longer than the sliding windows."""


def texts() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=random) for length in LENGTHS]


def _rank(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.hub.builtin import read_model_config
    from mppo.models.role import Role
    from mppo.parallel.groups import GroupRegistry
    from mppo.recipe.sections.megatron import MegatronConfig
    from mppo.recipe.sections.role_config import RoleConfig
    from mppo.recipe.sections.roles import BatchingConfig
    from mppo.rewards.reward_model.model_scorer import model_scores, scoring_batch

    def shared(texts: list[torch.Tensor]):
        """Two texts at home on the second rank, then one on the first, and so on."""
        homes = [int(number % 3 < 2) for number in range(len(texts))]
        held = {number: ids for number, ids in enumerate(texts) if homes[number] == rank}
        return scoring_batch(held, list(map(len, texts)), homes)

    def on_all(texts: list[torch.Tensor]):
        return scoring_batch(dict(enumerate(texts)), list(map(len, texts)), [-1] * len(texts))

    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=2)
    registry, found = GroupRegistry(), {}
    for number, (family, layout) in enumerate(CASES):
        megatron = MegatronConfig(**LAYOUTS[layout])
        batching = BatchingConfig(ppo_micro_batch_size_per_gpu=1 + number % 3)
        settings = RoleConfig("reward_model", batching, megatron, "float32")
        source, groups = folder / family, registry.of(megatron.layout(2))
        role = Role(settings, source, read_model_config(source), groups)
        found[family, layout] = model_scores(role, shared(texts()))
        if (family, layout) == ("llama", "DP2"):
            found["alone"] = model_scores(role, shared(texts()[:1]))  # a rank without a text
            found["replicated"] = model_scores(role, on_all(texts()))
    if rank == 1:
        torch.save(found, folder / "scores.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    for family in (*DENSE, *EXPERTS):
        save_reward_model(family, folder / family, **CHANGED.get(family, {}))
    return folder


@pytest.fixture(scope="module")
def scores(folder):
    start_ranks(_rank, (folder,), 2)
    return torch.load(folder / "scores.pt")


@cache
def expected(path: Path) -> torch.Tensor:
    model = hf.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return torch.stack([model(ids[None]).logits[0, 0] for ids in texts()])


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_scores_are_those_of_transformers(family, layout, folder, scores):
    theirs = expected(folder / family)
    assert theirs.std() > 0.05
    torch.testing.assert_close(scores[family, layout], theirs, atol=1e-5, rtol=0)


@pytest.mark.distributed
def test_texts_that_every_rank_holds_have_the_same_scores(scores):
    torch.testing.assert_close(scores["replicated"], scores["llama", "DP2"])


@pytest.mark.distributed
def test_one_text_is_scored_where_a_rank_has_none(folder, scores):
    theirs = expected(folder / "llama")[:1]
    torch.testing.assert_close(scores["alone"], theirs, atol=1e-5, rtol=0)
