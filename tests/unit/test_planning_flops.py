"""FLOPs of a pass: by hand, and against PyTorch's own count."""

import pytest
import torch
import transformers as hf
from torch.utils.flop_counter import FlopCounterMode

from mppo.batch.batch import Batch
from mppo.planning.flops import ModelFlops, model_flops, peak_tflops, seen_pairs, update_flops

DENSE = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=40, max_position_embeddings=64,
)  # fmt: skip
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=4)


def test_a_dense_model_by_hand():
    # heads of 4: q 16x16, k and v 8x16 each, output 16x16: 768; gate, up, down 3 * 16*24: 1152
    counted = model_flops(hf.Qwen2Config(**DENSE), "policy")
    # the last layer's 1152 only for the tokens that the head (40x16) reads
    # one pair: 4 heads * (4 for the score + 4 for the value)
    per_token, per_output = 2 * (3 * 768 + 2 * 1152), 2 * (40 * 16 + 1152)
    assert counted == ModelFlops(per_token, per_output, 2 * 32, (None,) * 3)
    assert model_flops(hf.Qwen2Config(**DENSE), "value").per_output == 2 * (16 + 1152)
    tied = hf.Qwen2Config(**DENSE, tie_word_embeddings=True)
    assert model_flops(tied, "policy") == counted
    # sequences of 3 and 2 tokens: 6 + 3 pairs in each layer; 2 tokens pass the head
    assert counted.forward([3, 2], 2) == 5 * 9216 + 2 * 3584 + 3 * 9 * 64
    assert counted.training([3, 2], 2) == 3 * counted.forward([3, 2], 2)


def test_a_mixture_counts_the_experts_of_a_token():
    # attention 768 as above, router 8x16, two experts of 3 * 16*12; the first layer is dense
    config = hf.Qwen3MoeConfig(**DENSE, **EXPERTS, mlp_only_layers=[0])
    per_token = 3 * 768 + 1152 + 2 * (128 + 2 * 576)
    assert model_flops(config, "policy").per_token == 2 * per_token


def test_latent_attention_by_hand():
    config = hf.DeepseekV3Config(
        **DENSE | {"num_key_value_heads": 4}, q_lora_rank=None, kv_lora_rank=8,
        qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5, first_k_dense_replace=3,
    )  # fmt: skip
    # q 4*6 x 16, down (8 + 2) x 16, up 4*(4 + 5) x 8, output 16 x 4*5: 384 + 160 + 288 + 320
    counted = model_flops(config, "policy")
    assert counted.per_token == 2 * (3 * 1152 + 2 * 1152)
    assert counted.per_pair == 2 * 4 * (6 + 5)


def test_a_window_limits_the_keys_of_a_query():
    assert [seen_pairs(n, None) for n in (0, 1, 4)] == [0, 1, 10]
    assert [seen_pairs(n, 2) for n in (0, 1, 4)] == [0, 1, 7]
    windows = model_flops(hf.MistralConfig(**DENSE, sliding_window=5), "policy").windows
    assert windows == (5, 5, 5)


@pytest.mark.parametrize("family", ["dense", "experts"])
def test_pytorch_counts_the_same_of_the_models_themselves(family):
    if family == "dense":
        config = hf.LlamaConfig(**DENSE)
    else:
        config = hf.MixtralConfig(**DENSE, num_local_experts=4, num_experts_per_tok=2)
    config._attn_implementation = config._experts_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(config)
    length = 7
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.arange(length)[None]).logits
    counted = model_flops(config, "policy")
    # PyTorch multiplies all queries with all keys, and the rotary angles
    square = 3 * counted.per_pair * length**2
    angles = 2 * length * 2
    expected = length * (counted.per_token + counted.per_output) + square + angles
    assert counter.get_total_flops() == expected
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == 2 * (expected - angles)


def test_an_update_counts_the_sequences_of_its_plan():
    batch = Batch(
        tokens_T=torch.zeros(9, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 4, 4, 6, 9]),
        response_mask_T=torch.tensor([0.0, 0, 1, 1, 0, 1, 0, 1, 1]),
        rollout_logprobs_T=torch.zeros(9),
        group_B=torch.arange(4),
        scores_B=torch.zeros(4),
        truncated_B=torch.zeros(4, dtype=torch.bool),
        weight_version_T=torch.zeros(9, dtype=torch.int64),
    )
    model = ModelFlops(100, 10, 1, (None,))
    plan = [[[0], [1]], [[3], []]]
    # 4 + 0 + 3 tokens, 2 + 2 of responses, 10 + 6 pairs
    assert update_flops(model, batch, plan, batch.response_B) == 3 * (700 + 40 + 16)


def test_peaks_go_by_the_name_of_the_device():
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989.4
    assert peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_tflops("NVIDIA L4") == 121.0
    for unknown in ("CPU (2 threads)", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA T4"):
        assert peak_tflops(unknown) is None
