"""Runs with offloaded roles: what lies where in each phase; saves, stop requests and resumes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks

from mppo.parallel.moved_storages import MovedStorages

ALL = "{parameters: true, gradients: true, optimizer: true}"
COMMON = [
    "model.path=builtin:tiny",
    "model.dtype=bfloat16",
    "data.task=arithmetic",
    "data.train_size=16",
    "data.val_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=5",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=2",
    "actor.optim.lr=1e-3",
    "critic.optim.lr=1e-3",
    "actor.ema_decay=0.9",
    "actor.use_kl_loss=true",
    "actor.kl_loss_type=full",
    "actor.megatron.tensor_model_parallel_size=2",
    "reward_model.path=builtin:tiny-reward",
    "reward_model.weight=0.5",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
    "trainer.checkpoint_hf=true",
]
OFFLOADED = [
    f"actor.megatron.offload={ALL}",
    f"critic.megatron.offload={ALL}",
    "ref.megatron.offload.parameters=true",
    "reward_model.megatron.offload.parameters=true",
]
TIED = [
    "model.path=builtin:tiny-llama",
    "actor.megatron.tensor_model_parallel_size=1",
    "actor.megatron.pipeline_model_parallel_size=2",
    "critic.megatron.pipeline_model_parallel_size=2",
    "trainer.schedule=flush_free",
]
"""The first and the last stage each hold the embeddings, and sum their gradients."""
BEFORE_UPDATE = ("gen", "reward", "forward ref", "forward actor", "forward critic")
STOPS = (*BEFORE_UPDATE, "update", "weight sync", "testing", "save_checkpoint")
"""Stages of an iteration and phases of the table."""
RESUMES = {"gen": OFFLOADED, "forward actor": []}
"""Stopped runs that are started again, with these settings."""
PARTS = ("parameters", "gradients", "optimizer")


def bytes_on_device(roles: dict) -> dict[str, dict[str, int]]:
    """Bytes of each part of each role that are not freed."""

    def total(tensors) -> int:
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    found = {}
    for name, role in roles.items():
        found[name] = {"parameters": total(p for s in role.stages for p in s.parameters())}
        if role.optimizer is not None:
            buffers = [b for c in role.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
            found[name]["gradients"] = total(buffer.grad_data for buffer in buffers)
            found[name]["optimizer"] = total(role.optimizer._state_tensors())
    return found


class Counted(MovedStorages):
    """Counts how often the computation is made to wait for the copies back to the device."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1
        super().wait()


def recorded(engine: Any, placement: Any, calls: list[list[str]]) -> type:
    """The engine's class, which also records the phase in which it is called, and is awake or not.

    An engine that shares the GPU has memory on it from new weights until it sleeps.
    """

    class Recorded(type(engine)):
        awake = False

        def update_weights(self, buckets, version: int) -> None:
            self._called("update_weights", True)
            super().update_weights(buckets, version)

        def generate(self, request):
            self._called("generate", True)
            return super().generate(request)

        def sleep(self) -> None:
            super().sleep()
            self._called("sleep", False)

        def _called(self, name: str, awake: bool) -> None:
            self.awake = awake
            calls.append([name, placement.phase])

    return Recorded


def contents(roles: dict) -> dict[str, str]:
    """A checksum of what a checkpoint of each trained role would hold of this rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    from mppo.checkpoint.role_state import sharded_state
    from mppo.weights.hf.safetensors_file import byte_view

    found = {}
    for name, role in roles.items():
        if role.optimizer is None:
            continue
        digest = hashlib.sha256()
        with role.groups.active(), torch.no_grad():
            tensors, _ = extract_sharded_tensors_and_factories(sharded_state(role))
            for entry in nested_values(tensors):
                data = entry.data.detach().contiguous().view(-1).view(torch.uint8)
                digest.update(entry.key.encode())
                digest.update(byte_view(data))
        found[name] = digest.hexdigest()
    return found


def _run(info, out: Path, overrides: list[str], stop_at: str | None = None) -> Any:
    """A run of two steps; a rank is asked to stop when a stage or phase of the second begins."""
    from mppo.recipe.load import load_recipe
    from mppo.supervision import stop_request
    from mppo.supervision.stop_request import listening
    from mppo.trainer.loop import train
    from mppo.trainer.role_moves import RolePlacement
    from mppo.trainer.run import Run
    from mppo.trainer.run_setup import build_run

    steps = [0]

    def begins(name: str) -> None:
        """Ask this rank once to stop in a stage or phase of the second step."""
        if (name, steps[0]) == (stop_at, 2) and info.rank == 1 and not stop_request.is_requested():
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop_request.is_requested():
                time.sleep(0.001)

    class Watched(RolePlacement):
        """Records after every move what is on the device, and what a checkpoint would hold."""

        def watch(self) -> None:
            self.seen: list[dict] = []
            for role in self._roles.values():
                role.weights.storages.__class__ = Counted
            self._see(self.phase, True)

        def enter(self, phase: str, early: bool = True) -> None:
            before = self.phase
            for role in self._roles.values():
                role.weights.storages.waits = 0
            super().enter(phase, early)
            self._see(before, early)
            begins(phase)

        def _see(self, before: str, early: bool) -> None:
            seen = {"before": before, "phase": self.phase, "early": early}
            seen["awake"] = self.engine.awake
            seen["bytes"] = bytes_on_device(self._roles)
            seen["waits"] = {n: role.weights.storages.waits for n, role in self._roles.items()}
            if not stop_at:
                seen["contents"] = contents(self._roles)
            self.seen.append(seen)

    class Stopped(Run):
        """Receives a stop signal at the beginning of a stage."""

        @contextmanager
        def stage(self, name: str, step: int):
            steps[0] = step
            begins(name)
            with super().stage(name, step):
                yield

    overrides = [*COMMON, *overrides, f"trainer.default_local_dir={out}"]
    with listening(within_s=0.0) as stop:
        run = build_run(load_recipe(None, overrides), info, stop)
        placement, calls = run.roles.placement, []
        run.engine.__class__ = recorded(run.engine, placement, calls)
        placement.__class__ = Watched  # the scorer of responses has this object too
        placement.engine, placement.calls = run.engine, calls
        placement.watch()
        run.__class__ = Stopped
        train(run)
    run.reporter.close()
    return run


def _worker(rank: int, out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.launch import LaunchInfo

    dist.init_process_group("gloo", f"file://{out}/store", rank=rank, world_size=2)
    info = LaunchInfo(rank, 2, rank, 2, "127.0.0.1", 1, "python")
    kept = _run(info, out / "plain", ["trainer.save_freq=1"])
    moved = _run(info, out / "offloaded", ["trainer.save_freq=1", *OFFLOADED])
    everything = bytes_on_device(kept.roles.placement._roles)
    seen = {"all": everything, "host": moved.roles.placement.host_nbytes}
    seen["phases"] = moved.roles.placement.seen
    seen["table"] = moved.roles.placement._table
    seen["kept"] = kept.roles.placement.seen
    seen["calls"] = moved.roles.placement.calls
    (out / f"seen_{rank}.json").write_text(json.dumps(seen))
    for stage in STOPS:
        _run(info, out / stage, OFFLOADED, stage)
    for stage, overrides in RESUMES.items():
        _run(info, out / stage, [*overrides, "trainer.save_freq=1"])
    _run(info, out / "tied", [*TIED, "trainer.save_freq=1"])
    _run(info, out / "tied, offloaded", [*TIED, *OFFLOADED], "forward actor")
    _run(info, out / "tied, offloaded", [*TIED, *OFFLOADED, "trainer.save_freq=1"])
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("offload")
    start_ranks(_worker, (out,), 2)
    return out


def checksums(run: Path, step: int) -> dict[str, Any]:
    """Size and checksum of the files of a checkpoint that hold states of roles."""
    folder = run / "checkpoints" / f"global_step_{step}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.endswith(".distcp")}


def test_a_run_with_offload_saves_and_exports_the_same_bits(runs):
    for step in (1, 2):
        plain = checksums(runs / "plain", step)
        assert len(plain) >= 4
        assert checksums(runs / "offloaded", step) == plain
        weights = f"hf/global_step_{step}/model.safetensors"
        assert (runs / "offloaded" / weights).read_bytes() == (
            runs / "plain" / weights
        ).read_bytes()


@pytest.mark.parametrize("stage", STOPS)
def test_a_stop_request_leaves_the_checkpoint_of_a_run_without_offload(runs, stage):
    done = 1 if stage in BEFORE_UPDATE else 2
    assert (runs / stage / "checkpoints" / f"global_step_{done}").is_dir(), os.listdir(runs / stage)
    assert checksums(runs / stage, done) == checksums(runs / "plain", done)


@pytest.mark.parametrize("stage", RESUMES)
def test_a_stopped_run_continues_with_and_without_offload(runs, stage):
    assert checksums(runs / stage, 2) == checksums(runs / "plain", 2)


def test_tied_embeddings_of_two_stages_leave_and_come_back(runs):
    for step in (1, 2):
        plain = checksums(runs / "tied", step)
        assert checksums(runs / "tied, offloaded", step) == plain
        assert len(plain) >= 4


def seen_by(runs: Path, rank: int) -> dict:
    return json.loads((runs / f"seen_{rank}.json").read_text())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_in_any_phase_would_hold_what_a_run_without_offload_holds_then(runs, rank):
    found = seen_by(runs, rank)
    assert [seen["phase"] for seen in found["kept"]] == [seen["phase"] for seen in found["phases"]]
    states = [[seen["contents"][role] for seen in found["phases"]] for role in ("actor", "critic")]
    assert states == [[seen["contents"][r] for seen in found["kept"]] for r in ("actor", "critic")]
    assert [len(set(one)) for one in states] == [3, 3], "at the start, and after each update"


def test_parts_lie_where_the_table_says(runs):
    seen = seen_by(runs, 0)
    phases = {entry["phase"] for entry in seen["phases"]}
    assert phases == set(seen["table"]) - {"save"}, "a save reads the parts where they are"
    places = set()
    for entry in seen["phases"]:
        # the reward model scores between generations, and before the forward passes
        early = entry["early"] or entry["before"] == "reward"
        here = ("device", "returning") if early else ("device",)
        for role, parts in seen["table"][entry["phase"]].items():
            for part, place in parts.items():
                wanted = seen["all"][role][part] if place in here else 0
                assert entry["bytes"][role][part] == wanted, (entry, role, part)
                assert seen["all"][role][part] > 0
                places.add((entry["phase"], place, early))
    assert {("reward", "returning", True), ("reward", "returning", False)} <= places


def test_the_engine_is_awake_only_in_phases_that_leave_it_the_memory(runs):
    seen = seen_by(runs, 0)
    assert {tuple(call) for call in seen["calls"]} == {
        ("update_weights", "weight sync"),
        ("generate", "generation"),
        ("sleep", "generation"),
    }
    beside = [entry for entry in seen["phases"] if entry["awake"]]
    assert {entry["phase"] for entry in beside} == {"weight sync", "generation", "reward"}
    assert not any(entry["early"] for entry in beside if entry["phase"] == "reward")


def test_only_the_phase_that_uses_weights_waits_for_them(runs):
    seen, found = seen_by(runs, 0), set()
    for entry in seen["phases"][1:]:
        for role, parts in seen["table"][entry["phase"]].items():
            place = parts["parameters"]
            if place != "host":  # what leaves waits too: its copy back must not be under way
                assert (entry["waits"][role] > 0) == (place == "device"), (entry, role)
                found.add(place)
    assert found == {"device", "returning"}


def test_host_memory_holds_what_leaves_and_no_more(runs):
    seen = seen_by(runs, 0)
    moved = sum(
        parts.get("parameters", 0) + parts.get("optimizer", 0) for parts in seen["all"].values()
    )
    assert moved <= seen["host"] < 1.1 * moved + (1 << 20)
