"""A real SGLang server: equal log-probabilities after every route of weight sync."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import torch
import transformers
import yaml
from sglang_case import (
    FAMILIES,
    TOLERANCE,
    needs_sglang,
    own,
    processes_of,
    prompts,
    response_logprobs,
    server_process,
)

from checkpoints_convert.__main__ import main as convert
from mppo.batch.episode import Episode
from mppo.checkpoint import responses
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.engine import GenerationRequest as Request
from mppo.rollout.engine import WeightSource
from mppo.rollout.sglang.fleet import API_KEY_VARIABLE
from mppo.rollout.sglang.http_client import JsonClient, RequestRefused
from mppo.rollout.sglang.sglang_engine import SGLangEngine
from mppo.rollout.transport.buckets import SharedBuffer
from mppo.rollout.transport.sync import TensorTransport
from mppo.safety.temporary import own_folder
from mppo.weights.bucket import WeightBucket

pytestmark = [pytest.mark.server, needs_sglang]


def versions(episode: Episode) -> list[int]:
    """Version of the weights that generated each token."""
    return [version for version, count in episode.parts for _ in range(count)]


def test_the_server_listens_on_loopback_and_requires_the_key(qwen2) -> None:
    port = qwen2.engine.fleet.processes[0].port
    reported = yaml.safe_load((own_folder() / f"server_{port}.yaml").read_text())
    assert "Failed to apply hooks" not in (qwen2.run_dir / "rollout" / "server_0.log").read_text()
    found = [c for process in processes_of(qwen2) for c in process.net_connections("tcp")]
    listening = {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}
    assert ("127.0.0.1", reported["port"]) in listening
    assert reported["nccl-port"] in {port for _, port in listening}
    url = qwen2.engine.fleet.apis[0].url
    for key in (None, "another"):
        with pytest.raises(RequestRefused, match="status 401"):
            JsonClient(url, key, timeout_s=30.0).post("/abort_request", {"abort_all": True})
    qwen2.check()


def test_the_server_loads_an_export_of_the_conversion_tool(qwen2, tmp_path) -> None:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(qwen2.config).eval()
    model.save_pretrained(tmp_path / "model")
    there = ["--hf", f"{tmp_path}/model", "--megatron", f"{tmp_path}/megatron"]
    back = ["--megatron", f"{tmp_path}/megatron", "--hf", f"{tmp_path}/back"]
    assert convert(["hf-to-megatron", *there, "--no-tokenizer"]) == 0
    assert convert(["megatron-to-hf", *back, "--max-shard-gb", "0.0001"]) == 0
    qwen2.engine.fleet.apis[0].update_from_disk(f"{tmp_path}/back", qwen2.version)
    sequences = [prompt.token_ids.tolist() for prompt in prompts(4)]
    for tokens, got in zip(sequences, qwen2.engine.logprobs(sequences), strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        want = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert got == pytest.approx(want.tolist(), abs=TOLERANCE)
    qwen2.sync()
    qwen2.check()


@pytest.mark.parametrize("sync", ["tensor", "distributed", "disk"])
def test_logprobs_are_equal_after_one_and_after_ten_updates(qwen2, monkeypatch, sync: str) -> None:
    qwen2.change_weights()
    qwen2.sync()
    monkeypatch.setenv(API_KEY_VARIABLE, qwen2.engine.fleet.key)
    url = qwen2.engine.fleet.apis[0].url
    engine = qwen2.connect(own(urls=(url,), sync=sync, server_args={}))
    for update in range(10):
        qwen2.change_weights()
        qwen2.sync(engine)
        if update in (0, 9):
            qwen2.check(engine)
    engine.stop()
    assert qwen2.engine.fleet.apis[0].is_up()


def test_greedy_and_stops_equal_the_local_engine(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    sampling = SamplingConfig(temperature=0.0)
    ours = qwen2.local.generate(Request(prompts(8), sampling, 12, seed=0))
    theirs = qwen2.engine.generate(Request(prompts(8), sampling, 12, seed=0))
    assert [each.here.ids.tolist() for each in ours] == [each.here.ids.tolist() for each in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert b.here.logprobs.tolist() == pytest.approx(a.here.logprobs.tolist(), abs=TOLERANCE)
    for one_left in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        theirs = qwen2.engine.generate(Request(prompts(8), SamplingConfig(**one_left), 12, seed=0))
        assert [each.here.ids.tolist() for each in ours] == [
            each.here.ids.tolist() for each in theirs
        ], one_left
    stops = tuple(range(2, 60))
    episodes = qwen2.engine.generate(
        Request(prompts(8), SamplingConfig(n=4, stop_token_ids=stops), 12, seed=0)
    )
    assert {each.finish_reason for each in episodes} == {"stop", "length"}
    for each in episodes:
        assert each.finish_reason == ("stop" if each.here.ids[-1].item() in stops else "length")
        assert not set(each.here.ids[:-1].tolist()) & set(stops)


def test_on_response_gets_responses_while_others_are_generated(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    parts: list[dict[int, Episode]] = []
    sampling = SamplingConfig(n=2)
    everything = qwen2.engine.generate(
        Request(prompts(40), sampling, 6, 0, lambda k, done: parts.append(dict(zip(k, done))))
    )
    assert len(parts) > 10
    assert sorted(key for part in parts for key in part) == list(range(80))
    assert all(everything[key] == each for part in parts for key, each in part.items())


def test_progress_is_observed_while_the_server_computes_and_not_after(qwen2) -> None:
    api = qwen2.engine.fleet.apis[0]
    qwen2.engine.fleet.wake("kv_cache")
    long = {"max_new_tokens": 1000, "ignore_eos": True}
    request = threading.Thread(target=api.generate, args=([[3, 4, 5]], long), daemon=True)
    request.start()
    observed = 0
    while request.is_alive():
        observed += api.observe_progress()
        request.join(0.1)
    assert observed > 1
    assert not api.observe_progress()


def test_remaining_requests_are_aborted_once_enough_prompts_are_complete(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    reported: set[int] = set()
    sampling = SamplingConfig(n=2, stop_token_ids=tuple(range(3, 12)))
    kept = qwen2.engine.generate(
        Request(
            prompts(24),
            sampling,
            400,
            0,
            lambda keys, done: reported.update(keys),
            num_prompts_needed=4,
        )
    )
    assert len(kept) == 8
    uids = [each.prompt.uid for each in kept]
    assert uids == sorted(uids)
    assert all(uids.count(uid) == 2 for uid in uids)
    assert {2 * uid + sample for uid in uids for sample in (0, 1)} <= reported
    assert len(reported) < 48
    qwen2.check_logprobs(kept, 1.0)
    qwen2.check()


def test_a_resumed_run_continues_partial_responses_with_new_weights(
    qwen2, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, qwen2.engine.fleet.key)
    url = qwen2.engine.fleet.apis[0].url
    engine = qwen2.connect(own(urls=(url,), max_staleness=1, server_args={}))
    sampling = SamplingConfig(n=2, stop_token_ids=tuple(range(3, 12)))
    qwen2.change_weights()
    qwen2.sync(engine)
    generation = engine.submit(Request(prompts(24), sampling, 400, 0, num_prompts_needed=4))
    first, left_over = generation.collect(), generation.left_over
    models = {qwen2.version: copy.deepcopy(qwen2.model)}
    qwen2.change_weights()
    qwen2.sync(engine)
    models[qwen2.version] = qwen2.model
    left = [p for p in prompts(24) if p.uid not in {each.prompt.uid for each in first}]
    (tmp_path / responses.file_of_rank(0)).write_bytes(responses.to_bytes(left_over))
    loaded = responses.load_responses(tmp_path)
    second = engine.generate(
        Request(left, sampling, 400, 0, num_prompts_needed=len(left), resumable=loaded)
    )
    engine.stop()
    assert left_over.keys() <= {(p.uid, sample) for p in left for sample in range(2)}
    given = {(each.prompt.uid, i % 2): each for i, each in enumerate(second)}
    for key, before in left_over.items():
        length = len(before.here.ids)
        assert given[key].prompt == before.prompt
        assert given[key].here.ids[:length].tolist() == before.here.ids.tolist()
        assert versions(given[key])[:length] == versions(before)
    assert [each.prompt.uid for each in second] == [p.uid for p in left for _ in range(2)]
    cut = {key for key, e in left_over.items() if e.length and e.finish_reason == "abort"}
    assert cut
    assert cut == {key for key, each in given.items() if len(set(versions(each))) == 2}
    for each in second:
        expected = {v: response_logprobs(model, each) for v, model in models.items()}
        by_version = [expected[version][i] for i, version in enumerate(versions(each))]
        assert each.here.logprobs.tolist() == pytest.approx(by_version, abs=TOLERANCE)
        assert len(each.here.ids) <= 400
        assert not set(each.here.ids[:-1].tolist()) & set(sampling.stop_token_ids)


def test_new_weights_wait_for_a_submitted_request(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    old, version = copy.deepcopy(qwen2.model), qwen2.version
    reported: dict[int, Episode] = {}
    request = Request(
        prompts(8), SamplingConfig(n=2), 40, 0, lambda keys, done: reported.update(zip(keys, done))
    )
    ahead = qwen2.engine.submit(request)
    qwen2.change_weights()
    qwen2.sync()
    assert sorted(reported) == list(range(16))
    fresh = qwen2.engine.generate(Request(prompts(2), SamplingConfig(temperature=0.0), 6, seed=0))
    qwen2.check_logprobs(fresh, 1.0)
    resumed = qwen2.engine.generate(replace(request, resumable=ahead.left_over))
    episodes = ahead.collect()
    assert episodes == resumed == [reported[row] for row in range(16)]
    assert not ahead.left_over, "what was collected is not left over"
    for each in episodes:
        assert versions(each) == [version] * len(each.here.ids)
        assert each.here.logprobs.tolist() == pytest.approx(
            response_logprobs(old, each), abs=TOLERANCE
        )


def test_an_update_interrupts_requests_that_go_on_with_the_new_weights(qwen2, monkeypatch) -> None:
    """Of four batches, one that is complete waits for its step while the others are generated."""
    monkeypatch.setenv(API_KEY_VARIABLE, qwen2.engine.fleet.key)
    url = qwen2.engine.fleet.apis[0].url
    engine = qwen2.connect(own(urls=(url,), max_staleness=1, server_args={}))
    qwen2.change_weights()
    qwen2.sync(engine)
    models, some = {qwen2.version: copy.deepcopy(qwen2.model)}, threading.Event()
    request = Request(
        prompts(16),
        SamplingConfig(stop_token_ids=tuple(range(3, 12))),
        400,
        0,
        lambda keys, done: some.set(),
        num_prompts_needed=4,
        among=4,
    )
    ahead = engine.submit(request)
    assert some.wait(300)
    qwen2.change_weights()
    qwen2.sync(engine)
    models[qwen2.version] = qwen2.model
    after = engine.submit(replace(request, resumable=ahead.left_over))
    found = after.collect()
    assert [each.prompt.uid for each in found] == [p.uid for p in prompts(4)]
    rest = replace(
        request,
        prompts=prompts(16)[4:],
        num_prompts_needed=12,
        among=None,
        resumable=after.left_over,
    )
    found += engine.generate(rest)
    engine.stop()
    assert [each.prompt.uid for each in found] == [p.uid for p in prompts(16)]
    ages = [set(versions(each)) for each in found]
    assert any(len(each) == 2 for each in ages), "some went on"
    assert set(models) == set().union(*ages)
    for each in found:
        expected = {v: response_logprobs(model, each) for v, model in models.items()}
        by_version = [expected[version][i] for i, version in enumerate(versions(each))]
        assert each.here.logprobs.tolist() == pytest.approx(by_version, abs=TOLERANCE)


def test_stop_aborts_a_submitted_request(qwen2, monkeypatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, qwen2.engine.fleet.key)
    url = qwen2.engine.fleet.apis[0].url
    engine = qwen2.connect(own(urls=(url,), server_args={}))
    qwen2.sync(engine)
    reported: list[int] = []
    engine.submit(
        Request(prompts(8), SamplingConfig(), 1900, 0, lambda keys, done: reported.extend(keys))
    )
    flying = [thread for thread in threading.enumerate() if thread.name == "rollout"]
    assert flying
    engine.stop()
    for thread in flying:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert len(reported) < 8


def test_sleep_releases_memory_and_wake_takes_back_what_is_needed_next(qwen2, monkeypatch) -> None:
    requested: list[tuple[str, tuple[str, ...] | None]] = []
    api = qwen2.engine.fleet.apis[0]

    def note(call) -> None:
        def noted(argument) -> None:
            tags = tuple(argument) if isinstance(argument, list) else None
            requested.append((call.__name__, tags))
            call(argument)

        monkeypatch.setattr(api, call.__name__, noted)

    note(api.wait_until_idle)
    note(api.release_memory)
    note(api.resume_memory)
    qwen2.engine.sleep()
    assert requested == [
        ("wait_until_idle", None),
        ("release_memory", ("weights", "kv_cache", "cuda_graph")),
    ]
    qwen2.engine.sleep()
    assert len(requested) == 2, "what is released is not released again"
    qwen2.change_weights()
    qwen2.sync()
    assert requested[2:] == [("resume_memory", ("weights",))]
    qwen2.check()
    assert requested[3:] == [("resume_memory", ("kv_cache", "cuda_graph"))]


def test_a_refused_stream_stops_with_a_reason_and_leaves_the_server(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    server = server_process(qwen2)
    misshapen = [WeightBucket.pack([("model.norm.weight", torch.ones(3))])]
    with pytest.raises(RuntimeError, match="update_weights_from_tensor"):
        qwen2.engine.update_weights(misshapen, qwen2.version)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    unknown = [WeightBucket.pack([(name, torch.ones(128, 64))])]
    with pytest.raises(RuntimeError, match=r"verify_sync: .*experts\.0\.up_proj.* no such tensor"):
        qwen2.engine.update_weights(unknown, qwen2.version)
    qwen2.sync()
    qwen2.check()
    assert server.is_running()


def test_the_next_bucket_is_produced_while_one_is_loaded(qwen2, monkeypatch) -> None:
    """Two buckets are in memory: the one after next waits until the first is loaded."""
    qwen2.change_weights()
    content, made, loaded = qwen2.stream(), [], []
    moved = threading.Condition()
    api = qwen2.engine.fleet.apis[0]
    load = api.update_from_tensor

    def stream() -> Iterator[WeightBucket]:
        for bucket in content:
            with moved:
                made.append(len(made))
                moved.notify()
            yield bucket

    def late(*arguments) -> None:
        with moved:
            begun = min(len(loaded) + 2, len(content))
            assert moved.wait_for(lambda: len(made) >= begun, timeout=300)
        load(*arguments)
        assert len(made) <= len(loaded) + 3
        loaded.append(len(loaded))

    monkeypatch.setattr(api, "update_from_tensor", late)
    qwen2.engine.update_weights(WeightSource(stream), qwen2.version)
    assert len(content) == len(made) == len(loaded) > 3
    monkeypatch.undo()
    qwen2.local.update_weights(qwen2.stream(), qwen2.version)
    qwen2.check()


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_one_wrong_byte_stops_the_job_and_names_the_tensor(qwen2, monkeypatch, name: str) -> None:
    qwen2.change_weights()
    payload = SharedBuffer.own_payload

    def corrupted(buffer, *arguments) -> str:
        """Change a byte after the checksums are computed."""
        made = payload(buffer, *arguments)
        for place in buffer.layout.places:
            if place.name == name:
                buffer.content[place.start + 5] ^= 1
        return made

    monkeypatch.setattr(SharedBuffer, "own_payload", corrupted)
    with pytest.raises(RuntimeError, match=rf"verify_sync: {name} arrived with other bytes"):
        qwen2.sync()
    monkeypatch.undo()
    qwen2.sync()
    qwen2.check()


def test_weights_that_differ_from_the_references_stop_the_job(qwen2, monkeypatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, qwen2.engine.fleet.key)
    url = qwen2.engine.fleet.apis[0].url
    engine = qwen2.connect(own(urls=(url,), verify_sync="logprob", server_args={}))
    qwen2.change_weights()
    qwen2.sync(engine)
    qwen2.change_weights()
    send = TensorTransport.send

    def corrupted(transport, bucket) -> None:
        """Send one tensor scaled by 1.01; the reference gets the original."""
        larger = "model.layers.1.mlp.up_proj.weight"
        named = [(n, t * 1.01 if n == larger else t) for n, t in bucket]
        send(transport, WeightBucket.pack(named))

    monkeypatch.setattr(TensorTransport, "send", corrupted)
    with pytest.raises(
        RuntimeError, match=rf"verify_sync: with weights of version {qwen2.version}"
    ):
        qwen2.sync(engine)
    engine.stop()


def test_stop_leaves_no_process(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    family = processes_of(qwen2)
    assert {os.getpgid(p.pid) for p in family} == {family[0].pid}, "what the guard kills at once"
    assert len(family) >= 4
    qwen2.engine.stop()
    _, alive = psutil.wait_procs(family, timeout=300)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_missing_model_folder_is_reported(tmp_path) -> None:
    folder, config = tmp_path / "nowhere", FAMILIES["qwen2"]()
    with pytest.raises(RuntimeError, match=r"(?s)ended while starting.*nowhere"):
        SGLangEngine(folder, config, torch.float32, own(), run_dir=tmp_path / "run")
