"""The SGLang servers of a run: started by mppo, or external servers by URL.

One rank, the head of a server, sends all requests to it. All ranks call the collective methods.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mppo.config.sections.rollout import RolloutConfig
from mppo.parallel.collectives import all_gather_objects, raise_on_any_rank, wait_for_ranks
from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.http_client import RequestRefused, ServerLost
from mppo.rollout.sglang.model_support import OWN_CLASSES
from mppo.rollout.sglang.server_options import (
    HOST,
    check_installed,
    own_server,
    server_environment,
    server_options,
)
from mppo.rollout.sglang.server_process import ServerError, ServerProcess
from mppo.rollout.transport.checked_load import LOADER
from mppo.rollout.transport.slice_load import SLICE_LOADER
from mppo.supervision.phase import tick

API_KEY_VARIABLE = "MPPO_ROLLOUT_API_KEY"
_POLL_S = 0.5


class Fleet:
    """All servers; the processes that this rank started, and clients to the servers it heads.

    The constructor starts mppo's own servers; the first ``revive`` waits until they answer.

    Args:
        rollout: the recipe's section.
        model_folder: the folder from which mppo's own servers read the model's configuration.
        hf_config: that configuration.
        dtype: of the servers' weights.
        rank, world: this rank and the number of ranks.
        device: this rank's device.
        folder: for logs and option files.
        group: process group of the ranks; None is the default one.

    Attributes:
        count: number of servers.
        mine: the servers for which this rank is the head.
        key: API key of all servers, or None.
        lost: servers of this rank that failed, and why.
        processes: the servers that this rank started.
        tensor_parallel: ranks of each server.
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
        group: dist.ProcessGroup | None,
    ) -> None:
        self._rollout, self._rank, self._world, self._group = rollout, rank, world, group
        self.tensor_parallel = rollout.tensor_model_parallel_size
        on_cpu = device.type == "cpu"
        # on a CPU the ranks share the cores, so one server serves all of them
        per_server = world if on_cpu else self.tensor_parallel
        self._model_type = hf_config.model_type
        self.count = len(rollout.urls) or rollout.servers or max(1, world // per_server)
        self.mine = [s for s in range(self.count) if self.head_of(s) == rank]
        self.key = self._agreed_key()
        self.lost: dict[int, str] = {}
        self._asleep: dict[int, set[str]] = {}
        self._apis: dict[int, SGLangApi] = {}
        self.processes: dict[int, ServerProcess] = {}
        if not rollout.urls:
            self._launch(model_folder, hf_config, dtype, device, folder)

    def head_of(self, server: int) -> int:
        """The rank that sends requests to a server."""
        return server * max(1, self._world // self.count) % self._world

    def _agreed_key(self) -> str | None:
        """A new key, the same on all ranks; for external servers the key in the environment."""
        if self._rollout.urls:
            return os.environ.get(API_KEY_VARIABLE)
        key = secrets.token_hex(32) if self._rank == 0 else None
        return all_gather_objects(key, self._world, self._group)[0]

    def _launch(
        self,
        model_folder: Path,
        hf_config: Any,
        dtype: torch.dtype,
        device: torch.device,
        folder: Path,
    ) -> None:
        on_cpu = device.type == "cpu"
        check_installed(on_cpu)
        for server in self.mine:
            options = server_options(
                str(model_folder),
                str(dtype).removeprefix("torch."),
                self.tensor_parallel,
                device.index or 0,
                on_cpu,
                self._rollout.server_args,
                hf_config,
                self._rollout.expert_parallel_size,
            )
            options["custom_weight_loader"] = [LOADER, SLICE_LOADER]
            environment = server_environment(self.tensor_parallel, on_cpu, hf_config.model_type)
            self.processes[server] = own_server(
                server,
                options,
                environment,
                self.key or "",
                folder,
                self._rollout.start_timeout_s,
                broadcasts=self._rollout.sync == "distributed",
            )
            self.processes[server].start()

    @property
    def apis(self) -> dict[int, SGLangApi]:
        """Clients to the servers that this rank heads, without lost ones."""
        return {s: api for s, api in self._apis.items() if s not in self.lost}

    def client(self, url: str) -> SGLangApi:
        """A client to any server of the run."""
        return SGLangApi(url, self.key, self._rollout.request_timeout_s)

    def last_output(self) -> str:
        """The end of the logs of the servers that this rank started, for error messages."""
        return "".join(process.last_output() for process in self.processes.values())

    def urls(self) -> dict[int, str]:
        """URL of every server, on every rank; collective."""
        mine = {server: api.url for server, api in self._apis.items()}
        everyone = all_gather_objects(mine, self._world, self._group)
        return dict(sorted(item for part in everyone for item in part.items()))

    def revive(self) -> list[int]:
        """Connect to new servers, and restart lost ones; collective.

        Returns:
            Servers of this rank that were connected or restarted, and so hold no weights.

        Raises:
            RuntimeError: on every rank, if a server does not start.
        """
        new, error = [], None
        try:
            for server in self.mine:
                process = self.processes.get(server)
                # a server can end while no request notices
                if process is not None and server in self._apis and not process.alive:
                    self.lost.setdefault(server, "its process ended")
                if server in self._apis and server not in self.lost:
                    continue
                if server in self.lost and process is not None:
                    print(f"mppo: restarting {process.name}: {self.lost[server]}", flush=True)
                    process.stop()
                    process.start()
                self._apis[server] = self._connected(server)
                self._asleep.pop(server, None)
                self.lost.pop(server, None)
                new.append(server)
        except (ServerError, ValueError, OSError) as caught:
            error = f"rank {self._rank}: {caught}"
        wait_for_ranks(self._world, self._group)
        raise_on_any_rank(error, self._world, self._group)
        return new

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
        if self._model_type in OWN_CLASSES and LOADER not in api.weight_loaders():
            raise ServerError(
                f"the server at {api.url} (rollout.urls) computes another model than the actor: "
                f"SGLang's own class for {self._model_type} {OWN_CLASSES[self._model_type]}; start "
                "the server with python -m mppo.serve, which gives it mppo's class"
            )
        return api

    @property
    def shares_devices(self) -> bool:
        """Whether servers share the training devices, and so must release memory for training."""
        return not self._rollout.urls and self._rollout.mode == "colocated"

    def sleep(self, tags: tuple[str, ...]) -> None:
        """Release the memory of ``tags`` on every server; collective.

        When it returns, all servers have released it: a rank that heads no server shares its GPU
        with one, too.
        """
        self._call(lambda server, api: api.release_memory(tags))
        for server in self.apis:
            self._asleep.setdefault(server, set()).update(tags)
        wait_for_ranks(self._world, self._group)

    def wake(self, tag: str) -> None:
        """Allocate the memory of ``tag`` again on servers that released it."""

        def resume(server: int, api: SGLangApi) -> None:
            if tag in self._asleep.get(server, ()):
                api.resume_memory([tag])
                self._asleep[server].discard(tag)

        self._call(resume)

    def _call(self, call: Callable[[int, SGLangApi], None]) -> None:
        """Call every server of this rank; one that does not answer becomes lost."""
        for server, api in self.apis.items():
            try:
                call(server, api)
            except ServerLost as error:
                self.lost[server] = str(error)

    def stop(self) -> None:
        """Stop every server that this rank started. Idempotent."""
        for process in self.processes.values():
            process.stop()
        self.processes, self._apis = {}, {}
