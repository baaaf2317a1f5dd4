"""The actor, transformers and the local engine compute the same function, for all settings.

The yardstick is transformers with its explicit ("eager") attention and its own masks. Where
transformers departs from the code that a family was published with, the yardstick is that code
(``mppo.models.transformers_model``), and a test below shows what was put right: DeepSeek-V2's YaRN
factor on scores, Gemma's ``hidden_act: gelu``. The epsilon of MLA's inner norms is
1e-6 in the published code and in transformers, whatever ``rms_norm_eps`` says.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from hf_families import BASE, randomise, tensors
from ranks import start_ranks
from torch import nn
from varied_models import V2, V3, VARIANTS, WINDOW, save_variant, yarn
from weights_worker import LENGTHS, Case, sequences, worker

from mppo import register
from mppo.batch.prompt import Prompt
from mppo.models.transformers_model import empty_model, load_model
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.local.local_engine import LocalEngine

TOLERANCE = 1e-5
"""Tolerance in nats for one token's log-probability in float32."""
RESPONSE = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Every variant as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("same_model")
    for name in VARIANTS:
        save_variant(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def actor_logits(models):
    """The actor's logits of the packed sequences of ``weights_worker``, by variant."""
    start_ranks(worker, (1, [Case(name) for name in VARIANTS], models), 1)
    results = torch.load(models / "results.pt", weights_only=False)
    return {name: result["logits"] for name, result in zip(VARIANTS, results, strict=True)}


@torch.no_grad()
def logprobs_of(model: nn.Module, sequence: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of every token but the first."""
    logits = model(torch.tensor([sequence])).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(sequence)[1:, None])[:, 0]


def plain_logits(config, weights) -> torch.Tensor:
    """Transformers' logits of the sequences, one after the other."""
    config._attn_implementation = config._experts_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(weights)
    return logits_of(model)


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([model(s[None]).logits[0] for s in sequences(model.config.vocab_size)])


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference of log-probabilities over the vocabulary."""
    return float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max())


def test_every_family_is_varied_and_sequences_exceed_windows():
    assert {variant.config.model_type for variant in VARIANTS.values()} == set(register.family.own)
    assert min(LENGTHS) > WINDOW


@pytest.mark.parametrize("name", VARIANTS)
def test_the_actor_computes_transformers_model(models, actor_logits, name):
    assert gap(actor_logits[name], logits_of(load_model(models / name))) < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_every_varied_setting_changes_the_model(models, name):
    """Otherwise a program that ignores a setting would pass the other tests."""
    model = load_model(models / name)
    ours, weights = logits_of(model), model.state_dict()
    as_it_is = gap(plain_logits(VARIANTS[name].settings(), weights), ours)
    assert (as_it_is > 20 * TOLERANCE) == VARIANTS[name].corrected
    for setting in VARIANTS[name].varied:
        other = plain_logits(VARIANTS[name].settings(without=setting), weights)
        assert gap(other, ours) > 20 * TOLERANCE, setting


@pytest.mark.parametrize("name", VARIANTS)
def test_the_local_engine_computes_transformers_model(models, name):
    """Log-probabilities of sampled tokens, and of given ones (used by ``verify_sync``)."""
    model = load_model(models / name)
    engine = LocalEngine(models / name, model.config, torch.float32)
    engine.update_weights([list(tensors(models / name).items())], 1)
    given = [sequence.tolist() for sequence in sequences(engine.vocab_size)]
    starts = (given[0][:3], given[1][: WINDOW + 5], given[2][:1])
    prompts = [Prompt(uid, tuple(start), "", "", "") for uid, start in enumerate(starts)]
    request = GenerationRequest(prompts, SamplingConfig(n=2, temperature=0.8), RESPONSE, seed=0)
    drawn = engine.generate(request)
    assert max(len(each.here.ids) for each in drawn) > WINDOW
    for each in drawn:
        tokens = [*each.prompt.token_ids.tolist(), *each.here.ids.tolist()]
        expected = logprobs_of(model, tokens, 0.8)[-len(each.here.ids) :]
        assert (each.here.logprobs - expected).abs().max() < TOLERANCE
    for sequence, values in zip(given, engine.logprobs(given), strict=True):
        assert (torch.tensor(values) - logprobs_of(model, sequence)).abs().max() < TOLERANCE


def test_deepseek_v2s_attention_is_v3s_with_its_yarn_factor(tmp_path):
    """Dense layers only: the two families then differ in nothing else, and transformers' V3 has the
    factor."""
    dense = {"first_k_dense_replace": 4, "rope_parameters": yarn(mscale=1.2, mscale_all_dim=0.6)}
    third = hf.DeepseekV3Config(**{**V3, **dense, "q_lora_rank": 24})
    model = hf.AutoModelForCausalLM.from_config(third, attn_implementation="eager").eval()
    randomise(model, zero_centred=False)
    second = hf.DeepseekV2Config(**{**V2, **dense, "q_lora_rank": 24})
    model.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path)
    assert gap(logits_of(load_model(tmp_path)), logits_of(model)) < TOLERANCE


def test_gemmas_gelu_is_the_tanh_form_it_was_trained_with(models):
    """``hidden_act: gelu`` of its first config.json; ``hidden_activation`` is taken at its word."""
    model = load_model(models / "gemma gelu")
    stated = VARIANTS["gemma gelu"].settings()
    stated.hidden_act = "gelu_pytorch_tanh"
    assert gap(plain_logits(stated, model.state_dict()), logits_of(model)) < TOLERANCE


@pytest.mark.parametrize("config", [hf.Qwen2Config, hf.MixtralConfig])
def test_a_null_head_dim_is_hidden_size_over_heads(config):
    settings = {**BASE, "num_local_experts": 4} if config is hf.MixtralConfig else BASE
    stated, null = (
        config(**settings, head_dim=width, rope_parameters=yarn()) for width in (16, None)
    )
    model = hf.AutoModelForCausalLM.from_config(stated, attn_implementation="eager").eval()
    ours = empty_model(null, torch.float32, torch.device("cpu"))
    ours.load_state_dict(model.state_dict())
    assert gap(logits_of(ours), logits_of(model)) < TOLERANCE
