"""Rollout by SGLang servers, behind the ``RolloutEngine`` protocol.

What the servers answer to their head ranks is brought to all ranks. A server that fails loses its
jobs to another; where none is left, it is started again and given the current weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mppo.batch import Trajectory
from mppo.config.schema import RolloutConfig
from mppo.rollout.engine import GenerationRequest, WeightSource
from mppo.rollout.exchange import (
    all_gather_varlen,
    gather_objects,
    raise_on_any_rank,
    snake_partition,
)
from mppo.rollout.local.engine import LocalEngine, stop_tokens
from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.generation import SGLangGeneration
from mppo.rollout.sglang.http_client import ServerLost
from mppo.rollout.sglang.requests import ATTEMPTS, Requests
from mppo.rollout.sglang.routed_experts import RoutingShape
from mppo.rollout.sync_check import SyncCheck
from mppo.rollout.transport.build import make_transport
from mppo.rollout.transport.slice_sync import SliceSync
from mppo.rollout.transport.sync import DiskTransport, DistributedTransport
from mppo.weights.bucket import WeightBucket

_SCORE_TOKENS = 8192
_SCORES_AT_ONCE = 4


class SGLangEngine:
    """SGLang servers as a rollout engine.

    Args:
        hf_folder: model folder (own servers read only its configuration).
        hf_config: its configuration.
        dtype: type of the servers' weights.
        rollout: the recipe's section.
        rank, world: this rank and the number of ranks that call.
        device: where the stream's tensors are.
        run_dir: for logs, option files and weights synced by disk.
        group: process group of the callers; None is the default one.
        routing: have trajectories carry the experts chosen, of this shape; None: do not ask.
    """

    def __init__(
        self,
        hf_folder: str | Path,
        hf_config: Any,
        dtype: torch.dtype,
        rollout: RolloutConfig,
        *,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        run_dir: Path,
        group: dist.ProcessGroup | None = None,
        routing: RoutingShape | None = None,
    ) -> None:
        self._routing = routing
        if routing is not None:
            # equal prompts that share a prefix cache are given the experts of only one of them
            arguments = {"disable_radix_cache": True, **rollout.server_args}
            arguments["enable_return_routed_experts"] = True
            rollout = rollout.model_copy(update={"server_args": arguments})
        if rollout.verify_sync == "checksum" and (rollout.sync != "tensor" or rollout.urls):
            raise ValueError(
                "rollout.verify_sync = checksum is done by own servers with rollout.sync = tensor: "
                "set verify_sync to logprob, which works with every route"
            )
        self._rollout, self._rank, self._world, self._group = rollout, rank, world, group
        self._device, folder = torch.device(device), run_dir / "rollout"
        self._stops = stop_tokens(hf_folder, hf_config)
        self._version: int | None = None
        self._pending: SGLangGeneration | None = None
        self._synced: dict[int, int] = {}  # server of this rank -> version it holds
        self._source: Iterable[WeightBucket] | None = None
        self._fleet = Fleet(
            rollout, Path(hf_folder), hf_config, dtype, rank, world, self._device, folder, group
        )
        self._requests = Requests(self._fleet, self._restore, rank, world, self._device, group)
        self._route = make_transport(
            rollout, self._fleet, self._device, folder, Path(hf_folder), rank, world
        )
        self._slices: SliceSync | None = None
        if rollout.sync_mode != "full":
            self._slices = SliceSync(
                rollout, self._fleet, dtype, self._device, folder, rank, world, group
            )
        self._check: SyncCheck | None = None
        if rollout.verify_sync == "logprob":
            oracle = LocalEngine(
                hf_folder, hf_config, dtype, rank=rank, world=world, device=device, group=group
            )
            self._check = SyncCheck(oracle, dtype, rollout.logprob_tolerance, self._fleet.count)

    # ---- weights

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """See ``RolloutEngine.update_weights``.

        Where ``buckets`` can be iterated again (it is no generator), a server lost in mid-update or
        later is restarted and given the weights again.

        Raises:
            RuntimeError: on every rank, when a server could not take the weights.
        """
        self._wait()
        self._source = None if iter(buckets) is buckets else buckets
        self._version, self._synced = version, {}
        self._revive()
        self._fleet.wake("weights")
        self._push(buckets)
        if self._check is not None:
            self._check.compare(self.logprobs, version)

    def _revive(self) -> None:
        """Lost servers started again, which so hold no weights; collective."""
        for server in self._fleet.revive():
            self._synced.pop(server, None)
            if self._slices is not None:
                self._slices.forget([server])

    def _push(self, buckets: Iterable[WeightBucket]) -> None:
        """Bring the weights to every server that lacks them; again to those lost on the way."""
        lacking = self._lacking()
        for _ in range(ATTEMPTS):
            self._send(buckets, lacking)
            lacking = self._lacking()
            if not lacking:
                return
            if self._source is None:
                break
            self._revive()
            buckets = self._source
        fix = "" if self._source else " (and the stream of weights cannot be repeated)"
        words = gather_objects(self._fleet.last_words(), self._world, self._group)
        raise RuntimeError(
            f"SGLang servers could not take the weights{fix}: {lacking}{''.join(words)}"
        )

    def _lacking(self) -> dict[int, str]:
        """Servers without the current weights, and why, on every rank; collective."""
        mine = {
            server: self._fleet.lost.get(server, "")
            for server in self._fleet.mine
            if self._synced.get(server) != self._version
        }
        everyone = gather_objects(mine, self._world, self._group)
        return {server: why for part in everyone for server, why in part.items()}

    def _send(self, buckets: Iterable[WeightBucket], lacking: dict[int, str]) -> None:
        """One pass of the stream, always drained, to the servers that lack it."""
        assert self._version is not None
        targets = {s: api for s, api in self._fleet.apis.items() if s in lacking}
        if self._slices is not None:
            if self._slices.takes(buckets):
                return self._send_slices(self._slices, buckets, targets)
            self._slices.forget(targets)
        senders = targets
        if isinstance(self._route, DistributedTransport):
            urls = self._fleet.urls()
            at_source = sorted(lacking) if self._rank == 0 else ()
            senders = {server: self._fleet.client(urls[server]) for server in at_source}
        self._route.open(senders, self._version)
        stream = self._sent(buckets)
        if self._check is not None:
            self._check.oracle.update_weights(stream, self._version)
        else:
            for _ in stream:
                pass
        error = _error_of(self._route.close)
        if isinstance(self._route, DistributedTransport):
            error = gather_objects(error, self._world, self._group)[0]
        self._raise_refusal(error)
        if isinstance(self._route, DiskTransport):
            route = self._route  # the folder is complete: every rank has agreed
            error = _error_of(lambda: route.load(targets))
            self._raise_refusal(error)
        self._note(targets, error)

    def _send_slices(
        self, slices: SliceSync, source: WeightSource, targets: Mapping[int, SGLangApi]
    ) -> None:
        """As ``_send``, of pieces; the oracle is given whole tensors."""
        assert self._version is not None
        slices.route.open(targets, self._version)
        slices.send(source, self._version, targets)
        if self._check is not None:
            self._check.oracle.update_weights(iter(source), self._version)
        error = _error_of(slices.route.close)
        self._raise_refusal(error)
        if error is None:
            slices.holds(targets, self._version)
        self._note(targets, error)

    def _note(self, targets: Mapping[int, SGLangApi], error: Exception | None) -> None:
        """Note which servers hold the weights and which are lost."""
        if error is None:
            self._synced.update(dict.fromkeys(targets, self._version))
            return
        for server, api in targets.items():
            if api.url == getattr(error, "url", api.url) or not api.is_up():
                self._fleet.lost[server] = str(error)

    def _sent(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """The stream, each bucket on its way to the servers as it passes."""
        for bucket in buckets:
            self._route.send(bucket)
            yield bucket

    def _raise_refusal(self, error: Exception | None) -> None:
        """Raise on every rank what repeating would not help; collective."""
        final = error is not None and not isinstance(error, ServerLost)
        raise_on_any_rank(
            f"rank {self._rank}: {error}" if final else None, self._world, self._group
        )

    def _restore(self) -> int:
        """Lost servers started again, with the current weights, whose version it is; collective."""
        if self._version is None:
            raise RuntimeError("the SGLang engine has no weights: call update_weights first")
        self._revive()
        lacking = self._lacking()
        if not lacking:
            return self._version
        if self._source is None:
            raise RuntimeError(
                f"SGLang servers {sorted(lacking)} lost their weights, which cannot be sent again: "
                "the last stream was a generator"
            )
        self._fleet.wake("weights")
        self._push(self._source)
        return self._version

    # ---- generation

    def submit(self, request: GenerationRequest) -> SGLangGeneration:
        """See ``RolloutEngine.submit``; SGLang draws its own random numbers, the seed is unused."""
        self._wait()
        stops = tuple(sorted({*self._stops, *request.sampling.stop_token_ids}))
        self._pending = SGLangGeneration(
            request, stops, self._routing, self._requests, self._rollout
        )
        return self._pending

    def generate(self, request: GenerationRequest) -> list[Trajectory]:
        """See ``RolloutEngine.generate``.

        Raises:
            RuntimeError: on every rank, when some prompt could not be served.
        """
        return self.submit(request).collect()

    def _wait(self) -> None:
        """No request is under way any longer; collective."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See ``RolloutEngine.logprobs``."""
        self._wait()
        self._restore()
        lengths = [len(s) for s in sequences]
        scored = [i for i, length in enumerate(lengths) if length > 1]
        dealt = [
            [scored[place] for place in part]
            for part in snake_partition([lengths[i] for i in scored], self._fleet.count)
        ]
        jobs = _by_tokens([i for s in self._fleet.mine for i in dealt[s]], lengths)
        answered = self._requests.answers(
            jobs,
            lambda api, job: api.score([sequences[i] for i in job]),
            _SCORES_AT_ONCE,
            may_leave=False,  # the check of a sync asks, when the step's updates are done
        )
        values = [v for index in range(len(jobs)) for row in answered[index] for v in row]
        flat = torch.tensor(values, dtype=torch.float32, device=self._device)
        result: list[list[float]] = [[] for _ in sequences]
        for rank, received in enumerate(all_gather_varlen(flat, self._world, self._group)):
            servers = [s for s in range(self._fleet.count) if self._fleet.head_of(s) == rank]
            numbers, at = received.tolist(), 0
            for index in (i for server in servers for i in dealt[server]):
                count = lengths[index] - 1
                result[index], at = numbers[at : at + count], at + count
        return result

    # ---- memory and end

    def sync_metrics(self) -> dict[str, float]:
        """See ``RolloutEngine.sync_metrics``: only of ``rollout.sync_mode`` other than ``full``."""
        return self._slices.metrics() if self._slices is not None else {}

    def sleep(self) -> None:
        """Servers on this run's devices give back the memory of weights and cache."""
        if self._fleet.shares_devices:
            self._wait()
            self._fleet.sleep(("weights", "kv_cache"))
            if self._device.type != "cpu":
                self._synced = {}

    def wake(self) -> None:
        """Servers take the weights' memory back; the cache's follows with the first request."""
        self._fleet.wake("weights")

    def stop(self) -> None:
        """End what is under way, and every own server. Idempotent."""
        if self._pending is not None:
            self._pending.drop()
        self._route.stop()
        if self._slices is not None:
            self._slices.route.stop()
        self._fleet.stop()


def _error_of(step: Callable[[], object]) -> Exception | None:
    """What a step raised, to be told to the other ranks."""
    try:
        step()
    except Exception as error:
        return error
    return None


def _by_tokens(indices: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Indices in requests of bounded size, order kept."""
    jobs: list[list[int]] = []
    held = _SCORE_TOKENS + 1
    for index in indices:
        if held + lengths[index] > _SCORE_TOKENS:
            jobs.append([])
            held = 0
        jobs[-1].append(index)
        held += lengths[index]
    return jobs
