"""The SGLang servers of a run: started by mppo, or external servers by URL.

One rank, the head of a server, sends all requests to it. All ranks call the collective methods.

The trainer and colocated servers use the device memory in turn: training; weight sync, during which
servers hold only their weights; generation. Before a server allocates, every rank returns the
unused memory of its allocator to the device, because another process cannot use it otherwise and a
server with too little memory exits. Before the trainer allocates, every server has released its
memory.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mppo.parallel import device as device_seam
from mppo.parallel.collectives import all_gather_objects, raise_on_any_rank, wait_for_ranks
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.report.run_record import RunEvent, append_event
from mppo.rollout.sglang.http_client import RequestRefused, ServerLost
from mppo.rollout.sglang.model_support import OWN_CLASSES
from mppo.rollout.sglang.server_api import CUDA_GRAPHS, KV_CACHE, MEMORY_TAGS, WEIGHTS, SGLangApi
from mppo.rollout.sglang.server_options import (
    HOST,
    own_server,
    server_environment,
    server_options,
    server_seed,
    shared_randomness,
    sleeping_environment,
)
from mppo.rollout.sglang.server_process import ServerError, ServerProcess
from mppo.rollout.transport.checked_load import LOADER
from mppo.rollout.transport.slice_load import SLICE_LOADER
from mppo.safety.redact import redact_text
from mppo.supervision.phase import tick

API_KEY_VARIABLE = "MPPO_ROLLOUT_API_KEY"
_POLL_S = 0.5


class Fleet:
    """All servers; the processes that this rank started, and clients to the servers it heads.

    The first ``revive`` starts mppo's own servers, and waits until all servers answer.

    Args:
        model_folder: the folder from which mppo's own servers read the model's configuration.
        folder: for logs, in the run folder.
        make_server: makes the process of a server, as ``own_server`` does.
        give_back: returns this rank's unused memory to the device.

    Attributes:
        mine: the servers for which this rank is the head.
        lost: servers of this rank that failed, and why.
        processes: the servers that this rank starts.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        model_folder: Path,
        hf_config: Any,
        dtype: torch.dtype,
        rank: int,
        world: int,
        device: torch.device,
        folder: Path,
        make_server: Callable[..., ServerProcess] = own_server,
        seed: int = 0,
        give_back: Callable[[], None] = device_seam.give_back_memory,
    ) -> None:
        self._give_back = give_back
        self._rollout, self._rank, self._world = rollout, rank, world
        self.run_dir = folder.parent
        self.tensor_parallel = rollout.tensor_model_parallel_size
        on_cpu = device.type == "cpu"
        # on a CPU the ranks share the cores, so one server serves all of them
        per_server = world if on_cpu else self.tensor_parallel
        self._model_type = hf_config.model_type
        self.count = len(rollout.urls) or rollout.servers or max(1, world // per_server)
        self.mine = [s for s in range(self.count) if self.head_of(s) == rank]
        self.key = os.environ.get(API_KEY_VARIABLE)
        if not rollout.urls:  # a new key, the same on all ranks
            self.key = all_gather_objects(secrets.token_hex(32) if rank == 0 else None, world)[0]
        self.lost: dict[int, str] = {}
        self._asleep: dict[int, set[str]] = {}
        self._seed, self._starts = seed, [0] * self.count
        self._external: dict[str, Mapping[str, Any]] = {}
        self._warned: set[str] = set()
        self._apis: dict[int, SGLangApi] = {}
        self.processes: dict[int, ServerProcess] = {}
        if not rollout.urls:
            self._make_servers(model_folder, hf_config, dtype, device, folder, make_server)

    @property
    def heads(self) -> list[int]:
        return [self.head_of(server) for server in range(self.count)]

    def head_of(self, server: int) -> int:
        return server * max(1, self._world // self.count) % self._world

    def _make_servers(
        self,
        model_folder: Path,
        hf_config: Any,
        dtype: torch.dtype,
        device: torch.device,
        folder: Path,
        make_server: Callable[..., ServerProcess],
    ) -> None:
        """Make the processes of this rank's servers, not yet started; collective."""
        on_cpu = device.type == "cpu"
        gpus = {} if on_cpu else self._gpus()
        for server in self.mine:
            options = server_options(
                str(model_folder),
                str(dtype).removeprefix("torch."),
                self.tensor_parallel,
                on_cpu,
                self._rollout.server_args,
                hf_config,
                self._rollout.expert_parallel_size,
            )
            options["custom_weight_loader"] = [LOADER, SLICE_LOADER]
            environment = server_environment(self.tensor_parallel, on_cpu, hf_config.model_type)
            if not on_cpu:
                environment |= sleeping_environment(gpus[server])
            self.processes[server] = make_server(
                server,
                options=options,
                environment=environment,
                api_key=self.key or "",
                folder=folder,
                start_timeout_s=self._rollout.start_timeout_s,
                broadcasts=self._rollout.sync == "distributed",
                random_seed=partial(self._random_seed, server),
            )

    def _gpus(self) -> dict[int, list[int]]:
        """Indices of the GPUs of this rank's servers on its machine; collective.

        A server of N ranks runs on the GPUs of N training ranks, of its head and of those after it,
        which must be on one machine. They are found by UUID, because a launcher may show each rank
        its own GPU only, or in another order.
        """
        uuids = all_gather_objects(device_seam.gpu_uuid(), self._world)
        found, error = {}, None
        for server in self.mine:
            ranks = [(self._rank + i) % self._world for i in range(self.tensor_parallel)]
            try:
                machine = device_seam.gpus_of_machine()
                found[server] = device_seam.gpu_indices([uuids[r] for r in ranks], machine)
            except ValueError as reason:
                error = (
                    f"SGLang server {server} cannot run on the GPUs of ranks {ranks}, seen from "
                    f"rank {self._rank}: {reason}. A server runs on one machine: set "
                    "rollout.tensor_model_parallel_size to a divisor of the ranks per node, and "
                    "start the ranks so that each may open all GPUs of its node (Slurm: without "
                    "--gpus-per-task)"
                )
        raise_on_any_rank(error, self._world)
        return found

    @property
    def apis(self) -> dict[int, SGLangApi]:
        """Clients to the servers that this rank heads, without lost ones."""
        return {s: api for s, api in self._apis.items() if s not in self.lost}

    def client(self, url: str) -> SGLangApi:
        return SGLangApi(url, self.key, self._rollout.request_timeout_s)

    def last_output(self) -> str:
        """The end of the logs of the servers that this rank started."""
        return "".join(process.last_output() for process in self.processes.values())

    def urls(self) -> dict[int, str]:
        """URL of every server, on every rank; collective."""
        mine = {server: api.url for server, api in self._apis.items()}
        everyone = all_gather_objects(mine, self._world)
        return dict(sorted(item for part in everyone for item in part.items()))

    def revive(self) -> list[int]:
        """Connect to new servers, and restart lost ones; return those of this rank, which hold no
        weights. Collective; RuntimeError on every rank if a server does not start."""
        new, error = self.missing(), None
        try:
            for server in new:  # all of them, before the first is waited for
                if server in self.processes:
                    self._start(server, self.processes[server])
            for server in new:
                self._apis[server] = self._connected(server)
                self._asleep.pop(server, None)
                self.lost.pop(server, None)
        except (ServerError, ValueError, OSError) as caught:
            error = f"rank {self._rank}: {caught}"
        wait_for_ranks(self._world)
        raise_on_any_rank(error, self._world)
        if self._rollout.urls:
            self._check_external_seeds()
        return new

    def _check_external_seeds(self) -> None:
        everyone = all_gather_objects(self._external, self._world)
        options = {url: each for part in everyone for url, each in part.items()}
        for text in shared_randomness(options) if self._rank == 0 else ():
            if text not in self._warned:
                self._warned.add(text)
                print(f"mppo: warning: {text}", flush=True)
                append_event(self.run_dir, RunEvent("warning", None, redact_text(text)))

    def missing(self) -> list[int]:
        """Servers of this rank that must be started or connected to."""
        for server, process in self.processes.items():
            # a server can end while no request notices
            if server in self._apis and not process.alive:
                self.lost.setdefault(server, "its process ended")
        return [server for server in self.mine if server not in self.apis]

    def _start(self, server: int, process: ServerProcess) -> None:
        if server in self.lost:
            text = f"restarting {process.name}: {self.lost[server]}"
            print(f"mppo: {text}", flush=True)
            append_event(self.run_dir, RunEvent("engine", None, redact_text(text)))
            self._starts[server] += 1
        process.stop()
        process.write_log(f"{process.name} starts with random_seed {self._random_seed(server)}")
        process.start()

    def _random_seed(self, server: int) -> int:
        return server_seed(self._seed, server, self._starts[server])

    def _connected(self, server: int) -> SGLangApi:
        """A client to a server that answers, takes the key and computes the actor's model."""
        if not self._rollout.urls:
            process = self.processes[server]
            process.wait_until_up()
            return self.client(f"http://{HOST}:{process.port}")
        api = self.client(self._rollout.urls[server])
        deadline = time.monotonic() + self._rollout.start_timeout_s
        print(f"mppo: waiting for the SGLang server at {api.url}", flush=True)
        try:
            while not api.is_up():
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"no SGLang server answered at {api.url} (rollout.urls) within "
                        f"{self._rollout.start_timeout_s:.0f} s (rollout.start_timeout_s)"
                    )
                tick()
                time.sleep(_POLL_S)
        except RequestRefused as error:
            raise ServerError(
                f"{api.url} (rollout.urls) does not answer like an SGLang server: {error}"
            ) from error
        if api.accepts_key() is False:
            raise ServerError(
                f"the server at {api.url} (rollout.urls) refuses the key in {API_KEY_VARIABLE}: "
                "set that variable to the server's api_key"
            )
        options = api.options()
        loaders = options.get("custom_weight_loader") or ()
        if self._model_type in OWN_CLASSES and LOADER not in loaders:
            raise ServerError(
                f"the server at {api.url} (rollout.urls) computes another model than the actor: "
                f"SGLang's own class for {self._model_type} {OWN_CLASSES[self._model_type]}; start "
                "the server with python -m mppo.serve, which gives it mppo's class"
            )
        self._external[api.url] = {name: options.get(name) for name in ("random_seed", "dp_size")}
        return api

    @property
    def shares_devices(self) -> bool:
        """Whether servers share the training devices, and so must release memory for training."""
        return not self._rollout.urls and self._rollout.mode == "colocated"

    def for_training(self) -> None:
        """Make colocated servers release all memory; collective."""
        if self.shares_devices:
            self.sleep(MEMORY_TAGS)

    def free_for_servers(self) -> None:
        """Return every rank's unused memory to the devices, before servers allocate; collective."""
        if self.shares_devices:
            self._give_back()
            wait_for_ranks(self._world)

    def for_weights(self) -> None:
        """Make colocated servers hold only weights: the trainer needs the rest for the weight
        stream. Collective."""
        if self.shares_devices:
            self.sleep((KV_CACHE, CUDA_GRAPHS))
            self.free_for_servers()
            self.wake((WEIGHTS,))

    def for_generation(self) -> None:
        """Make colocated servers hold all their memory; collective."""
        if self.shares_devices:
            self.free_for_servers()
            self.wake(MEMORY_TAGS)

    def sleep(self, tags: Sequence[str]) -> None:
        """Release the memory of ``tags`` on every server that holds it; collective. It returns when
        all have: a rank that heads no server shares its GPU with one, too."""

        def release(server: int, api: SGLangApi) -> None:
            asleep = self._asleep.setdefault(server, set())
            held = [tag for tag in tags if tag not in asleep]
            if held:
                api.wait_until_idle(self._rollout.request_timeout_s)
                api.release_memory(held)
                asleep.update(held)

        self._call(release)
        wait_for_ranks(self._world)

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory of ``tags`` again on every server that released it."""

        def resume(server: int, api: SGLangApi) -> None:
            asleep = self._asleep.get(server, set())
            released = [tag for tag in tags if tag in asleep]
            if released:
                api.resume_memory(released)
                asleep.difference_update(released)

        self._call(resume)

    def _call(self, call: Callable[[int, SGLangApi], None]) -> None:
        """Call every server of this rank; one that does not answer becomes lost."""
        for server, api in self.apis.items():
            try:
                call(server, api)
            except ServerLost as error:
                self.lost[server] = str(error)

    def stop(self) -> None:
        for process in self.processes.values():
            process.stop()
        self.processes, self._apis = {}, {}
