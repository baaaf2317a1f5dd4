"""On one GPU: the log-probabilities of a role equal Hugging Face's.

With ``MPPO_DEVICE=cpu`` (``one_gpu.sh --device cpu``) on the CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("MPPO_DEVICE") != "cpu",
    reason="needs a CUDA device",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_on_one_gpu(tmp_path, dtype):
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, Qwen2Config

    from mppo.batch.episode import Episode, EpisodeTokens
    from mppo.batch.packing import pack_episodes
    from mppo.batch.prompt import Prompt
    from mppo.models.role import Role
    from mppo.models.streamed_role import forward
    from mppo.parallel import device
    from mppo.parallel.groups import GroupRegistry
    from mppo.recipe.sections.megatron import MegatronConfig
    from mppo.recipe.sections.role_config import RoleConfig
    from mppo.recipe.sections.roles import BatchingConfig

    config = Qwen2Config(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    device.prepare_megatron()
    device.select(0, 1)
    store = f"file://{tmp_path}/store"
    dist.init_process_group(device.backend(), store, rank=0, world_size=1)
    try:
        megatron = MegatronConfig()
        name = str(dtype).removeprefix("torch.")
        settings = RoleConfig("actor", BatchingConfig(), megatron, name)
        groups = GroupRegistry().of(megatron.layout(1))
        role = Role(settings, tmp_path / "model", config, groups)
        ids = torch.randint(0, 101, (3, 17)).tolist()
        batch = pack_episodes(
            [
                Episode.sampled(
                    Prompt(i, x[:5], "", "", ""), EpisodeTokens(x[5:], [0.0] * 12), "stop", 0
                )
                for i, x in enumerate(ids)
            ]
        )
        logprobs_T = forward(role, batch, role.plan(batch, training=False)).logprobs_T
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
        model = model.to(device.device())
        tokens = torch.tensor(ids, device=device.device())
        with torch.no_grad():
            logp = model(tokens).logits.float().log_softmax(-1)
        want = logp[:, 4:-1].gather(2, tokens[:, 5:, None]).flatten().cpu()
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(
            logprobs_T[batch.response_mask_T > 0], want, rtol=0, atol=tolerance
        )
    finally:
        dist.destroy_process_group()
