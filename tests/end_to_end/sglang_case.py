"""Small models of the families tested with SGLang, and an engine with its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from torch import nn

from mppo.batch.episode import Episode
from mppo.batch.prompt import Prompt
from mppo.recipe.sections.rollout import RolloutConfig, SamplingConfig
from mppo.rollout.engine import GenerationRequest, WeightSource
from mppo.rollout.local.local_engine import LocalEngine
from mppo.rollout.sglang.server_options import own_server
from mppo.rollout.sglang.server_process import ServerProcess
from mppo.rollout.sglang.sglang_engine import SGLangEngine
from mppo.weights.bucket import WeightBucket

needs_sglang = pytest.mark.skipif(
    find_spec("sglang") is None or find_spec("sglang_cpu_compat") is None,
    reason="SGLang for the CPU is not installed: make sglang-cpu",
)
TOLERANCE = 1e-5
START_S = 900.0
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "gemma": lambda: transformers.GemmaConfig(
        **{**SIZES, "tie_word_embeddings": True, "head_dim": 32}
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SIZES, **LATENT}),
}


class Case:
    """A model folder, changing weights, an SGLang engine, and the local engine as the reference."""

    def __init__(
        self,
        folder: Path,
        family: str,
        rollout: RolloutConfig,
        make_server: Callable[..., ServerProcess] = own_server,
    ) -> None:
        torch.manual_seed(0)
        self.config = FAMILIES[family]()
        self.model: nn.Module = transformers.AutoModelForCausalLM.from_config(self.config).eval()
        self.folder = folder / "model"
        self.model.save_pretrained(self.folder)
        self.version = 0
        self.local = LocalEngine(self.folder, self.config, torch.float32)
        self.run_dir = folder
        self.make_server = make_server
        self.engine = self.connect(rollout)

    def connect(self, rollout: RolloutConfig) -> SGLangEngine:
        return SGLangEngine(
            self.folder,
            self.config,
            torch.float32,
            rollout,
            run_dir=self.run_dir,
            make_server=self.make_server,
        )

    def change_weights(self) -> None:
        """Change every parameter, by too little to bring router scores near a tie."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)

    def stream(self) -> list[WeightBucket]:
        """The model's weights under their checkpoint names, in several buckets."""
        from transformers.core_model_loading import revert_weight_conversion

        tensors = revert_weight_conversion(self.model, self.model.state_dict())
        named = list(tensors.items())
        size = max(1, len(named) // 4)
        return [WeightBucket.pack(named[i : i + size]) for i in range(0, len(named), size)]

    def sync(self, *engines: SGLangEngine) -> None:
        for engine in engines or (self.engine,):
            engine.update_weights(WeightSource(self.stream), self.version)
        self.local.update_weights(self.stream(), self.version)

    def check(self, engine: SGLangEngine | None = None, max_tokens: int = 8) -> list[Episode]:
        engine = engine or self.engine
        episodes = engine.generate(
            GenerationRequest(
                prompts(6), SamplingConfig(temperature=0.7, top_p=0.9, n=2), max_tokens, seed=0
            )
        )
        self.check_logprobs(episodes, 0.7)
        sequences = [_all_tokens(each) for each in episodes]
        for ours, theirs in zip(
            self.local.logprobs(sequences), engine.logprobs(sequences), strict=True
        ):
            assert theirs == pytest.approx(ours, abs=TOLERANCE)
        return episodes

    def check_logprobs(self, episodes: list[Episode], temperature: float) -> None:
        for each in episodes:
            expected = response_logprobs(self.model, each, temperature)
            assert each.here.logprobs.tolist() == pytest.approx(expected, abs=TOLERANCE)
            assert each.parts[-1][0] == self.version


@torch.no_grad()
def response_logprobs(model: nn.Module, episode: Episode, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of a response's tokens by a transformers model."""
    tokens = torch.tensor([_all_tokens(episode)])
    logprobs = (model(tokens).logits[0] / temperature).log_softmax(-1)[:-1]
    return logprobs.gather(-1, tokens[0, 1:, None])[-len(episode.here.ids) :, 0].tolist()


def _all_tokens(episode: Episode) -> list[int]:
    return [*episode.prompt.token_ids.tolist(), *episode.here.ids.tolist()]


def prompts(count: int) -> list[Prompt]:
    torch.manual_seed(7)
    return [
        Prompt(i, tuple(torch.randint(3, 512, (2 + 5 * i % 23,)).tolist()), "t", "", "")
        for i in range(count)
    ]


def synced_case(
    folder: Path, make_server: Callable[..., ServerProcess] = own_server
) -> Iterator[Case]:
    """A Qwen2 case with synced weights whose server checks every sync; it stops at the end."""
    case = Case(folder, "qwen2", own(verify_sync="checksum"), make_server)
    case.change_weights()
    case.sync()
    yield case
    case.engine.stop()


def processes_of(case: Case) -> list[psutil.Process]:
    """Guard, server, and the server's processes."""
    guard = psutil.Process(case.engine.fleet.processes[0].pid)
    return [guard, *guard.children(), *guard.children()[0].children(recursive=True)]


def server_process(case: Case) -> psutil.Process:
    return processes_of(case)[1]


def own(**options: object) -> RolloutConfig:
    """The configuration of a server that the engine starts."""
    return RolloutConfig(
        name="sglang",
        start_timeout_s=START_S,
        request_timeout_s=300.0,
        **{"server_args": {"max_total_tokens": 16384}, **options},
    )
