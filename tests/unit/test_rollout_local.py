"""The local engine equals transformers, for any lengths and batching."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from mppo.batch.episode import Episode
from mppo.batch.prompt import Prompt
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.local import decoding
from mppo.rollout.local.local_engine import LocalEngine, compute_dtype, stop_tokens

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}


def _config(family: str) -> transformers.PretrainedConfig:
    tied = {"tie_word_embeddings": family == "tied"}
    return {
        "qwen2": lambda: transformers.Qwen2Config(**SIZES, **tied),
        "tied": lambda: transformers.Qwen2Config(**SIZES, **tied),
        "mistral": lambda: transformers.MistralConfig(**SIZES, **tied, sliding_window=9),
        "gemma2": lambda: transformers.Gemma2Config(
            **SIZES, **tied, head_dim=16, sliding_window=9, attn_logit_softcapping=2.0
        ),
        "llama": lambda: transformers.LlamaConfig(**SIZES, **tied),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, **tied, head_dim=16),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
            **SIZES, **tied, **MOE, shared_expert_intermediate_size=24
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **tied, **MOE, head_dim=16),
        "mixtral": lambda: transformers.MixtralConfig(**SIZES, **tied, num_local_experts=4),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SIZES, **LATENT}, **tied),
    }[family]()


FAMILIES = ("qwen2", "tied", "llama", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3")


def _reference(config: transformers.PretrainedConfig, seed: int = 0) -> nn.Module:
    """A transformers model with weights spread enough for sampling to matter."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.numel() > 8:
                tensor.add_(torch.randn_like(tensor) * (0.2 if tensor.requires_grad else 0))
    return model.eval()


def _checkpoint(model: nn.Module, folder: str) -> list[tuple[str, torch.Tensor]]:
    """The model's tensors under the names a saved checkpoint has."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return list(load_file(f"{folder}/model.safetensors").items())


@pytest.fixture
def engine_and_reference(tmp_path) -> Callable[..., tuple[LocalEngine, nn.Module]]:
    def build(family: str, **options: object) -> tuple[LocalEngine, nn.Module]:
        config = _config(family)
        reference = _reference(config)
        tensors = _checkpoint(reference, str(tmp_path))
        engine = LocalEngine(tmp_path, config, torch.float32, **options)
        engine.update_weights([tensors[:3], tensors[3:]], version=5)
        return engine, reference

    return build


def _prompts(lengths: tuple[int, ...] = (5, 1, 17, 9, 30, 2)) -> list[Prompt]:
    torch.manual_seed(1)
    return [
        Prompt(100 + i, tuple(torch.randint(3, 97, (n,)).tolist()), "t", "", "")
        for i, n in enumerate(lengths)
    ]


@torch.no_grad()
def _logprobs(model: nn.Module, tokens: list[int], temperature: float = 1.0) -> list[float]:
    logits = model(torch.tensor([tokens])).logits[0].float() / temperature
    target = torch.tensor(tokens)[1:, None]
    return logits.log_softmax(-1)[:-1].gather(-1, target)[:, 0].tolist()


def _all_tokens(episode: Episode) -> list[int]:
    return [*episode.prompt.token_ids.tolist(), *episode.here.ids.tolist()]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(engine_and_reference, family: str) -> None:
    engine, reference = engine_and_reference(family)
    sampling = SamplingConfig(temperature=0.8, n=2, top_p=0.95)
    episodes = engine.generate(GenerationRequest(_prompts(), sampling, 20, seed=0))
    assert [each.prompt.uid for each in episodes] == [u for u in range(100, 106) for _ in range(2)]
    for each in episodes:
        expected = _logprobs(reference, _all_tokens(each), 0.8)[-len(each.here.ids) :]
        assert each.here.logprobs.tolist() == pytest.approx(expected, abs=2e-5)
        assert each.parts[-1][0] == 5
    sequences = [_all_tokens(each) for each in episodes]
    for sequence, values in zip(sequences, engine.logprobs(sequences), strict=True):
        assert values == pytest.approx(_logprobs(reference, sequence), abs=2e-5)


def test_greedy_equals_transformers_generate(engine_and_reference) -> None:
    engine, reference = engine_and_reference("qwen2")
    for each in engine.generate(
        GenerationRequest(_prompts(), SamplingConfig(temperature=0.0), 20, seed=0)
    ):
        tokens = torch.tensor([each.prompt.token_ids.tolist()])
        expected = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=20
        )
        assert each.here.ids.tolist() == expected[0, tokens.shape[1] :].tolist()


def test_tokens_do_not_depend_on_batching_or_order(engine_and_reference) -> None:
    engine, _ = engine_and_reference("qwen2")
    small, _ = engine_and_reference("qwen2", batch_size=3)
    sampling = SamplingConfig(n=3)
    prompts = _prompts()
    complete = engine.generate(GenerationRequest(prompts, sampling, 15, seed=4))
    assert [each.here.ids.tolist() for each in complete] == [
        each.here.ids.tolist()
        for each in small.generate(GenerationRequest(prompts, sampling, 15, seed=4))
    ]
    backwards = engine.generate(GenerationRequest(prompts[::-1], sampling, 15, seed=4))
    by_uid = {}
    for each in backwards:
        by_uid.setdefault(each.prompt.uid, []).append(each.here.ids.tolist())
    assert [each.here.ids.tolist() for each in complete] == [
        r for p in prompts for r in by_uid[p.uid]
    ]
    assert len({tuple(each.here.ids.tolist()) for each in complete}) == len(complete)
    assert complete != engine.generate(GenerationRequest(prompts, sampling, 15, seed=5))


def test_rows_stop_at_stop_tokens_and_at_the_length(engine_and_reference) -> None:
    engine, _ = engine_and_reference("qwen2")
    stops = tuple(range(2, 20))
    sampling = SamplingConfig(n=8, stop_token_ids=stops)
    episodes = engine.generate(GenerationRequest(_prompts(), sampling, 6, seed=0))
    assert {each.finish_reason for each in episodes} == {"stop", "length"}
    for each in episodes:
        ended = each.here.ids[-1].item() in stops
        assert each.finish_reason == ("stop" if ended else "length")
        assert len(each.here.ids) == len(each.here.logprobs)
        assert ended or len(each.here.ids) == 6
        assert not set(each.here.ids[:-1].tolist()) & set(stops)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_finished_rows_leave_the_batch_without_changing_the_others(
    engine_and_reference, family: str
) -> None:
    engine, reference = engine_and_reference(family)
    sampling = SamplingConfig(n=8, stop_token_ids=tuple(range(2, 12)))
    for each in engine.generate(GenerationRequest(_prompts(), sampling, 40, seed=0)):
        expected = _logprobs(reference, _all_tokens(each))[-len(each.here.ids) :]
        assert each.here.logprobs.tolist() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "deepseek_v3"])
def test_long_prompts_are_read_in_pieces(engine_and_reference, family: str, monkeypatch) -> None:
    monkeypatch.setattr(decoding, "_PREFILL_TOKENS", 24)  # four columns of six prompts
    engine, reference = engine_and_reference(family)
    for each in engine.generate(GenerationRequest(_prompts(), SamplingConfig(), 20, 0)):
        expected = _logprobs(reference, _all_tokens(each))[-len(each.here.ids) :]
        assert each.here.logprobs.tolist() == pytest.approx(expected, abs=2e-5)


def test_long_responses_have_transformers_logprobs(engine_and_reference) -> None:
    engine, reference = engine_and_reference("llama")
    engine.stop_tokens = ()
    for each in engine.generate(GenerationRequest(_prompts((3, 6)), SamplingConfig(), 300, seed=0)):
        assert len(each.here.ids) == 300
        expected = _logprobs(reference, _all_tokens(each))[-300:]
        assert each.here.logprobs.tolist() == pytest.approx(expected, abs=2e-5)


def test_streams_that_do_not_fit_are_refused_by_name(tmp_path) -> None:
    config = _config("qwen3_moe")
    tensors = _checkpoint(_reference(config), str(tmp_path))
    engine = LocalEngine(tmp_path, config, torch.float32)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate(GenerationRequest(_prompts(), SamplingConfig(), 2, seed=0))
    missing = [t for t in tensors if "experts.3.up_proj" not in t[0]]
    with pytest.raises(ValueError, match=r"2 tensors are missing.*experts\.3\.up_proj"):
        engine.update_weights([missing], 1)
    name, tensor = tensors[0]
    with pytest.raises(ValueError, match=rf"unknown tensor {name}x \(nearest: {name}\)"):
        engine.update_weights([[(name + "x", tensor)], tensors], 1)
    with pytest.raises(ValueError, match="has shape"):
        engine.update_weights([[(name, tensor[:1])], tensors], 1)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.logprobs([[1, 2]])
    engine.update_weights([tensors], 1)
    assert len(engine.generate(GenerationRequest(_prompts(), SamplingConfig(), 2, seed=0))) == 6


def test_bfloat16_weights_are_rounded_whatever_type_computes(tmp_path) -> None:
    config = _config("qwen2")
    reference = _reference(config)
    engine = LocalEngine(tmp_path, config, torch.bfloat16)
    engine.update_weights([_checkpoint(reference, str(tmp_path))], 1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    wide = compute_dtype(torch.bfloat16, torch.device("cpu")) == torch.float32
    sequence = list(range(3, 40))
    expected = _logprobs(reference, sequence)
    assert engine.logprobs([sequence])[0] == pytest.approx(expected, abs=1e-5 if wide else 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_any_width_are_multiplied(tmp_path, dtype: torch.dtype) -> None:
    """Torch's grouped product needs rows of a multiple of 16 bytes; 6 and 12 are not."""
    settings = {**SIZES, **MOE, "moe_intermediate_size": 6 if dtype == torch.float32 else 12}
    config = transformers.Qwen3MoeConfig(**settings, head_dim=16)
    engine = LocalEngine(tmp_path, config, dtype)
    reference = _reference(config).to(dtype)
    reference.set_experts_implementation("eager")
    engine.update_weights([_checkpoint(reference, str(tmp_path))], 1)
    (each,) = engine.generate(GenerationRequest(_prompts((5,)), SamplingConfig(), 10, seed=0))
    (values,) = engine.logprobs([_all_tokens(each)])
    expected = _logprobs(reference, _all_tokens(each))
    allowed = 2e-5 if dtype == torch.float32 else 0.3
    assert values == pytest.approx(expected, abs=allowed)
    assert each.here.logprobs.tolist() == pytest.approx(values[-10:], abs=allowed)


def test_short_sequences_have_no_logprobs(engine_and_reference) -> None:
    engine, _ = engine_and_reference("qwen2")
    assert [len(v) for v in engine.logprobs([[5], [5, 6], []])] == [0, 1, 0]


def test_stop_tokens_come_from_both_files(tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert stop_tokens(tmp_path, transformers.Qwen2Config(eos_token_id=2)) == (2, 7, 9)


def test_empty_prompts_are_refused(engine_and_reference) -> None:
    engine, _ = engine_and_reference("qwen2")
    with pytest.raises(ValueError, match="empty prompt"):
        engine.generate(
            GenerationRequest([Prompt(0, (), "t", "", "")], SamplingConfig(), 2, seed=0)
        )


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_weights_that_are_not_finite_are_reported(engine_and_reference, top_p: float) -> None:
    engine, reference = engine_and_reference("qwen2")
    weights = [(name, tensor * float("nan")) for name, tensor in reference.state_dict().items()]
    engine.update_weights([weights], version=6)
    with pytest.raises(ValueError, match=r"nan.*prompt 10\d.*version 6.*actor.optim.lr"):
        engine.generate(GenerationRequest(_prompts(), SamplingConfig(top_p=top_p), 4, seed=0))


def test_on_response_gets_responses_while_others_are_generated(engine_and_reference) -> None:
    engine, _ = engine_and_reference("qwen2", batch_size=4)
    reported: dict[int, Episode] = {}
    everything = engine.generate(
        GenerationRequest(
            _prompts(),
            SamplingConfig(n=2),
            5,
            0,
            lambda keys, done: reported.update(zip(keys, done)),
        )
    )
    assert len(reported) == 8
    assert all(everything[key] == episode for key, episode in reported.items())
