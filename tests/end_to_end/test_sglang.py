"""The real SGLang server: equal log-probabilities after every route, and no failure loses work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from torch import Tensor, nn

from mppo.batch import Prompt, Trajectory
from mppo.config.schema import RolloutConfig, SamplingConfig
from mppo.rollout.engine import WeightSource
from mppo.rollout.fleet import API_KEY_VARIABLE
from mppo.rollout.local import LocalEngine
from mppo.rollout.sglang import SGLangEngine

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        find_spec("sglang") is None or find_spec("sglang_cpu_compat") is None,
        reason="SGLang for the CPU is not installed: make sglang-cpu",
    ),
]
ROOT = Path(__file__).parents[2]
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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# keys after the blank are SGLang's own, absent from what transformers saves
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
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
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SIZES, **LATENT}),
}


class Case:
    """A model folder, weights that change, an SGLang engine and the local engine as the oracle."""

    def __init__(self, folder: Path, family: str, rollout: RolloutConfig) -> None:
        torch.manual_seed(0)
        self.config = FAMILIES[family]()
        self.model: nn.Module = transformers.AutoModelForCausalLM.from_config(self.config).eval()
        self.folder = folder / "model"
        self.model.save_pretrained(self.folder)
        self.version = 0
        self.local = LocalEngine(self.folder, self.config, torch.float32)
        self.run_dir = folder
        self.engine = self.connect(rollout)

    def connect(self, rollout: RolloutConfig) -> SGLangEngine:
        return SGLangEngine(self.folder, self.config, torch.float32, rollout, run_dir=self.run_dir)

    def change_weights(self) -> None:
        """Move every parameter; routing stays decided (no near ties) by moving it less."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)

    def stream(self) -> list[list[tuple[str, Tensor]]]:
        """The model as a checkpoint names it, in several buckets."""
        from transformers.core_model_loading import revert_weight_conversion

        tensors = revert_weight_conversion(self.model, self.model.state_dict())
        named = list(tensors.items())
        size = max(1, len(named) // 4)
        return [named[i : i + size] for i in range(0, len(named), size)]

    def sync(self, *engines: SGLangEngine) -> None:
        for engine in engines or (self.engine,):
            engine.update_weights(WeightSource(self.stream), self.version)
        self.local.update_weights(self.stream(), self.version)

    def check(self, engine: SGLangEngine | None = None, max_tokens: int = 8) -> list[Trajectory]:
        engine = engine or self.engine
        trajectories = engine.generate(
            prompts(6), SamplingConfig(temperature=0.7, top_p=0.9, n=2), max_tokens, seed=0
        )
        self.check_logprobs(trajectories, 0.7)
        sequences = [[*t.prompt.token_ids, *t.response_ids] for t in trajectories]
        for ours, theirs in zip(
            self.local.logprobs(sequences), engine.logprobs(sequences), strict=True
        ):
            assert theirs == pytest.approx(ours, abs=TOLERANCE)
        return trajectories

    @torch.no_grad()
    def check_logprobs(self, trajectories: list[Trajectory], temperature: float) -> None:
        for t in trajectories:
            tokens = torch.tensor([[*t.prompt.token_ids, *t.response_ids]])
            logprobs = (self.model(tokens).logits[0] / temperature).log_softmax(-1)[:-1]
            expected = logprobs.gather(-1, tokens[0, 1:, None])[-len(t.response_ids) :, 0]
            assert t.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)
            assert t.weight_version == self.version


def prompts(count: int) -> list[Prompt]:
    torch.manual_seed(7)
    return [
        Prompt(i, tuple(torch.randint(3, 512, (2 + 5 * i % 23,)).tolist()), "t", "", "")
        for i in range(count)
    ]


def own(**options: object) -> RolloutConfig:
    return RolloutConfig(
        name="sglang",
        start_timeout_s=START_S,
        request_timeout_s=300.0,
        **{"server_args": {"max_total_tokens": 16384}, **options},
    )


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Iterator[Case]:
    case = Case(tmp_path_factory.mktemp("qwen2"), "qwen2", own())
    yield case
    case.engine.stop()


def _server_process(case: Case) -> psutil.Process:
    """The server itself, under its guard."""
    guard = psutil.Process(case.engine._fleet._processes[0]._process.pid)
    return guard.children()[0]


def _family_of(case: Case) -> list[psutil.Process]:
    guard = psutil.Process(case.engine._fleet._processes[0]._process.pid)
    return [guard, *guard.children(recursive=True)]


@pytest.mark.parametrize("sync", ["tensor", "distributed", "disk"])
def test_logprobs_are_equal_after_one_and_after_ten_updates(qwen2, monkeypatch, sync: str) -> None:
    qwen2.change_weights()
    qwen2.sync()
    monkeypatch.setenv(API_KEY_VARIABLE, qwen2.engine._fleet.key)
    url = qwen2.engine._fleet._apis[0].url
    engine = qwen2.connect(own(urls=(url,), sync=sync, server_args={}))
    for update in range(10):
        qwen2.change_weights()
        qwen2.sync(engine)
        if update in (0, 9):
            qwen2.check(engine)
    engine.stop()
    assert qwen2.engine._fleet._apis[0].is_up()


def test_greedy_and_stops_equal_the_local_engine(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    sampling = SamplingConfig(temperature=0.0)
    ours = qwen2.local.generate(prompts(8), sampling, 12, seed=0)
    theirs = qwen2.engine.generate(prompts(8), sampling, 12, seed=0)
    assert [t.response_ids for t in ours] == [t.response_ids for t in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert b.logprobs == pytest.approx(a.logprobs, abs=TOLERANCE)
    stops = tuple(range(2, 60))
    trajectories = qwen2.engine.generate(
        prompts(8), SamplingConfig(n=4, stop_token_ids=stops), 12, seed=0
    )
    assert {t.finish_reason for t in trajectories} == {"stop", "length"}
    for t in trajectories:
        assert t.finish_reason == ("stop" if t.response_ids[-1] in stops else "length")
        assert not set(t.response_ids[:-1]) & set(stops)


def test_sleep_and_wake_keep_the_engine_usable(qwen2) -> None:
    qwen2.engine.sleep()
    qwen2.change_weights()
    qwen2.engine.wake()
    qwen2.sync()
    qwen2.check()


def test_kill_9_in_mid_generation_loses_nothing(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    victim = _server_process(qwen2)

    def kill_when_busy() -> None:
        time.sleep(1.0)
        victim.kill()

    killer = threading.Thread(target=kill_when_busy)
    killer.start()
    trajectories = qwen2.engine.generate(prompts(48), SamplingConfig(), 300, seed=0)
    killer.join()
    assert not victim.is_running()
    assert [t.prompt.uid for t in trajectories] == list(range(48))
    qwen2.check_logprobs(trajectories, 1.0)


def test_kill_9_in_mid_update_and_while_asleep(qwen2) -> None:
    qwen2.change_weights()
    killed = []

    def deadly_stream() -> Iterator[list[tuple[str, Tensor]]]:
        for number, bucket in enumerate(qwen2.stream()):
            yield bucket
            if number == 1 and not killed:
                killed.append(_server_process(qwen2))
                killed[0].kill()
                killed[0].wait()

    qwen2.engine.update_weights(WeightSource(deadly_stream), qwen2.version)
    qwen2.local.update_weights(qwen2.stream(), qwen2.version)
    assert killed
    qwen2.check()
    qwen2.engine.sleep()
    asleep = _server_process(qwen2)
    asleep.kill()
    asleep.wait()
    qwen2.engine.wake()
    qwen2.change_weights()
    qwen2.sync()
    qwen2.check()


@pytest.mark.extended
def test_a_refused_stream_stops_with_a_reason(qwen2) -> None:
    qwen2.change_weights()
    wrong = [[("model.norm.weight", torch.ones(3))]]
    with pytest.raises(RuntimeError, match="update_weights_from_tensor"):
        qwen2.engine.update_weights(wrong, qwen2.version)
    qwen2.sync()
    qwen2.check()


@pytest.mark.extended
def test_stop_leaves_no_process(tmp_path) -> None:
    case = Case(tmp_path, "qwen2", own())
    family = _family_of(case)
    case.engine._fleet._processes[0].wait_until_up()
    family = _family_of(case)
    assert len(family) >= 4
    case.engine.stop()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.extended
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen2"])
def test_every_family_is_equal(tmp_path, family: str) -> None:
    case = Case(tmp_path, family, own())
    try:
        for _ in range(2):
            case.change_weights()
            case.sync()
            case.check()
    finally:
        case.engine.stop()


@pytest.mark.extended
def test_tensor_parallel_server_is_equal(tmp_path) -> None:
    case = Case(tmp_path, "qwen2", own(tensor_model_parallel_size=2))
    try:
        case.change_weights()
        case.sync()
        case.check()
    finally:
        case.engine.stop()


@pytest.mark.extended
def test_a_missing_model_folder_is_told(tmp_path) -> None:
    config = FAMILIES["qwen2"]()
    engine = SGLangEngine(
        tmp_path / "nowhere", config, torch.float32, own(), run_dir=tmp_path / "run"
    )
    try:
        with pytest.raises(RuntimeError, match=r"(?s)ended while starting.*nowhere"):
            engine.update_weights([], 1)
    finally:
        engine.stop()


@pytest.mark.extended
def test_training_with_sglang(tmp_path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        str(ROOT / "mppo" / "train.py"), "--config", str(ROOT / "recipes" / "tiny_cpu_sglang.yaml"),
        f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.total_training_steps=2",
        f"rollout.start_timeout_s={START_S}", "trainer.export_hf=false",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        assert process.wait(timeout=1800) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    gaps = [r["training/rollout_logprob_diff_max"] for r in rows if "actor/grad_norm" in r]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
