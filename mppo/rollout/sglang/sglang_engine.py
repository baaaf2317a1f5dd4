"""The rollout engine that generates with SGLang servers; implements ``RolloutEngine``.

Head ranks send requests to servers, and bring the responses to all ranks. If a server fails, the
other servers of its rank take its jobs; if no server is left, it is restarted and receives the
current weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mppo.batch.episode import Episode
from mppo.parallel.collectives import all_gather_objects, raise_on_any_rank
from mppo.parallel.device import give_back_memory
from mppo.parallel.partition import partition
from mppo.recipe.rules.engine_rules import sglang_options
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.rollout.engine import GenerationRequest, WeightSource
from mppo.rollout.local.local_engine import LocalEngine, stop_tokens
from mppo.rollout.response_gather import gather_logprobs
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.generation import SGLangGeneration
from mppo.rollout.sglang.http_client import ServerLost
from mppo.rollout.sglang.requests import ATTEMPTS, Requests
from mppo.rollout.sglang.server_api import SGLangApi
from mppo.rollout.sglang.server_options import own_server
from mppo.rollout.sglang.server_process import ServerProcess
from mppo.rollout.sglang.server_response import RoutingShape
from mppo.rollout.sglang.server_turns import ServerTurns
from mppo.rollout.transport.broadcast import DistributedTransport
from mppo.rollout.transport.slice_sync import SliceSync
from mppo.rollout.transport.sync import DiskTransport, make_transport
from mppo.weights.bucket import WeightBucket

_SCORE_TOKENS = 8192
_SCORES_AT_ONCE = 4
_PROBE_TOKENS = 48
_SEQUENCES_PER_SERVER = 2
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}


class SyncCheck:
    """Compares log-probabilities of random tokens with those of an oracle, which loads the same
    weight stream. ``tolerance``: largest allowed difference, nats; None: by dtype."""

    def __init__(
        self, oracle: LocalEngine, dtype: torch.dtype, tolerance: float | None, servers: int
    ) -> None:
        self.oracle = oracle
        self._tolerance = _TOLERANCE[dtype] if tolerance is None else tolerance
        generator = torch.Generator().manual_seed(0)
        shape = (_SEQUENCES_PER_SERVER * servers, _PROBE_TOKENS)
        self._sequences = torch.randint(oracle.vocab_size, shape, generator=generator).tolist()

    def compare(
        self, logprobs: Callable[[list[list[int]]], list[list[float]]], version: int
    ) -> None:
        """Compare the servers' log-probabilities with the oracle's. Collective; RuntimeError on
        every rank if a difference exceeds the tolerance."""
        ours, theirs = self.oracle.logprobs(self._sequences), logprobs(self._sequences)
        gap = (torch.tensor(ours) - torch.tensor(theirs)).abs().nan_to_num(nan=float("inf"))
        if gap.max() > self._tolerance:
            sequence, position = divmod(int(gap.argmax()), gap.shape[1])
            raise RuntimeError(
                f"verify_sync: with weights of version {version}, SGLang's log-probabilities "
                f"differ from transformers' by {gap.max():.3g} at token {position + 1} of probe "
                f"{sequence} (mean {gap.mean():.3g}; allowed {self._tolerance:.3g}, "
                "rollout.logprob_tolerance)"
            )


class SGLangEngine:
    """SGLang servers as a rollout engine. The constructor is collective: it starts mppo's own
    servers on the memory that the trainer leaves, and puts them to sleep.

    Args:
        hf_folder: model folder (servers started by mppo read only its configuration).
        run_dir: for logs, option files and weights synced by disk.
        routing: shape of the routed experts that episodes carry; None: they carry none.
        make_server: makes the process of a server, as ``own_server`` does.
        give_back: returns this rank's unused memory to the device.
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
        seed: int = 0,
        routing: RoutingShape | None = None,
        make_server: Callable[..., ServerProcess] = own_server,
        give_back: Callable[[], None] = give_back_memory,
    ) -> None:
        self._routing = routing
        if routing is not None:
            # prompts that share a cached prefix get the experts of only one of them; a session's
            # next turn is computed from the cache, and so by the experts that the session has kept
            cached = rollout.agent is not None
            arguments = {"disable_radix_cache": not cached, **sglang_options(rollout.server_args)}
            arguments["enable_return_routed_experts"] = True
            rollout = rollout.model_copy(update={"server_args": arguments})
        self._rollout, self._rank, self._world = rollout, rank, world
        self._device, folder = torch.device(device), run_dir / "rollout"
        self._stops, self._vocab_size = stop_tokens(hf_folder, hf_config), hf_config.vocab_size
        self._version: int | None = None
        self._pending: SGLangGeneration | None = None
        self._synced: dict[int, int | None] = {}  # server of this rank -> version it holds
        self._source: Iterable[WeightBucket] | None = None
        place = (rank, world, self._device, folder)
        self.fleet = Fleet(
            rollout, Path(hf_folder), hf_config, dtype, *place, make_server, seed, give_back
        )
        self._requests = Requests(self.fleet, self._restore, rank, world)
        self._transport = make_transport(
            rollout, self.fleet, self._device, folder, Path(hf_folder), rank, world
        )
        self.slices: SliceSync | None = None
        if rollout.sync_mode != "full":
            self.slices = SliceSync(rollout, self.fleet, dtype, self._device, folder, rank, world)
        self._sync_check: SyncCheck | None = None
        if rollout.verify_sync == "logprob":
            oracle = LocalEngine(hf_folder, hf_config, dtype, rank=rank, world=world, device=device)
            self._sync_check = SyncCheck(oracle, dtype, rollout.logprob_tolerance, self.fleet.count)
        if self.fleet.shares_devices:
            try:
                self._revive()
                self.fleet.for_training()
            except BaseException:
                self.stop()
                raise

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """See ``RolloutEngine.update_weights``; RuntimeError on every rank if a server could not
        load the weights.

        If ``buckets`` can be iterated again (it is not a generator), a server that is lost during
        the update or later is restarted and receives the weights again.
        """
        self._wait()
        self._source = None if iter(buckets) is buckets else buckets
        self._version, self._synced = version, {}
        self._revive()
        self.fleet.for_weights()
        self._push(buckets)
        if self._sync_check is not None:
            self._sync_check.compare(self.logprobs, version)

    def _revive(self) -> None:
        """Start servers that do not run, and record that they hold no weights; collective."""
        if not any(all_gather_objects(self.fleet.missing(), self._world)):
            return
        self.fleet.free_for_servers()  # a server's KV cache takes a share of what is free now
        for server in self.fleet.revive():
            self._synced.pop(server, None)
            if self.slices is not None:
                self.slices.forget([server])

    def _push(self, buckets: Iterable[WeightBucket]) -> None:
        """Send the weights to every server that lacks them; repeat for servers lost meanwhile."""
        lacking = self._lacking()
        for _ in range(ATTEMPTS):
            self._send(buckets, lacking)
            lacking = self._lacking()
            if not lacking:
                return
            if self._source is None:
                break
            self._revive()
            self.fleet.for_weights()
            buckets = self._source
        note = "" if self._source else " (and this weight stream cannot be repeated)"
        outputs = all_gather_objects(self.fleet.last_output(), self._world)
        raise RuntimeError(
            f"SGLang servers could not load the weights{note}: {lacking}{''.join(outputs)}"
        )

    def _lacking(self) -> dict[int, str]:
        """Servers without the current weights, and the reason, on every rank; collective."""
        mine = {
            server: self.fleet.lost.get(server, "")
            for server in self.fleet.mine
            if self._synced.get(server) != self._version
        }
        everyone = all_gather_objects(mine, self._world)
        return {server: why for part in everyone for server, why in part.items()}

    def _send(self, buckets: Iterable[WeightBucket], lacking: dict[int, str]) -> None:
        """Send the stream once to the servers that lack it; the stream is always drained."""
        assert self._version is not None
        targets = {s: api for s, api in self.fleet.apis.items() if s in lacking}
        if self.slices is not None:
            if isinstance(buckets, WeightSource) and buckets.slices is not None:
                return self._send_slices(self.slices, buckets, targets)
            self.slices.forget(targets)
        senders = targets
        if isinstance(self._transport, DistributedTransport):
            # rank 0 broadcasts, so it also makes the requests to all servers
            urls = self.fleet.urls()
            at_source = sorted(lacking) if self._rank == 0 else ()
            senders = {server: self.fleet.client(urls[server]) for server in at_source}
        self._transport.open(senders, self._version)
        stream = self._sent(buckets)
        if self._sync_check is not None:
            self._sync_check.oracle.update_weights(stream, self._version)
        else:
            for _ in stream:
                pass
        error = _error_of(self._transport.close)
        if isinstance(self._transport, DistributedTransport):
            error = all_gather_objects(error, self._world)[0]  # only rank 0 sends
        self._raise_refusal(error)
        if isinstance(self._transport, DiskTransport):
            transport = self._transport  # the collective above: rank 0 has written the folder
            error = _error_of(lambda: transport.load(targets))
            self._raise_refusal(error)
        self._record(targets, error)

    def _send_slices(
        self, slices: SliceSync, source: WeightSource, targets: Mapping[int, SGLangApi]
    ) -> None:
        """As ``_send``, by slices; the oracle of the sync check gets whole tensors."""
        assert self._version is not None
        slices.transport.open(targets, self._version)
        slices.send(source, self._version, targets)
        if self._sync_check is not None:
            self._sync_check.oracle.update_weights(iter(source), self._version)
        error = _error_of(slices.transport.close)
        self._raise_refusal(error)
        if error is None:
            slices.record(targets, self._version)
        self._record(targets, error)

    def _record(self, targets: Mapping[int, SGLangApi], error: Exception | None) -> None:
        """Record which servers hold the weights, or are lost."""
        if error is None:
            self._synced.update(dict.fromkeys(targets, self._version))
            return
        for server, api in targets.items():
            if api.url == getattr(error, "url", api.url) or not api.is_up():
                self.fleet.lost[server] = str(error)

    def _sent(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """Send each bucket of a stream, then pass it on."""
        for bucket in buckets:
            self._transport.send(bucket)
            yield bucket

    def _raise_refusal(self, error: Exception | None) -> None:
        """Raise on every rank an error that a repetition would not repair; collective."""
        final = error is not None and not isinstance(error, ServerLost)
        raise_on_any_rank(f"rank {self._rank}: {error}" if final else None, self._world)

    def _restore(self) -> int:
        """Make every server ready to generate: lost ones are restarted and receive the current
        weights, whose version is returned. Collective."""
        if self._version is None:
            raise RuntimeError("the SGLang engine has no weights: call update_weights first")
        self._revive()
        lacking = self._lacking()
        if lacking and self._source is None:
            raise RuntimeError(
                f"SGLang servers {sorted(lacking)} lost their weights, which cannot be sent again, "
                "because the last weight stream was a generator: pass a WeightSource"
            )
        if lacking and self._source is not None:
            self.fleet.for_weights()
            self._push(self._source)
        self.fleet.for_generation()
        return self._version

    def submit(self, request: GenerationRequest) -> SGLangGeneration:
        """See ``RolloutEngine.submit``; ``seed`` is unused: SGLang draws its own random numbers."""
        self._wait()
        stops = tuple(sorted({*self._stops, *request.sampling.stop_token_ids}))
        self._pending = SGLangGeneration(
            request, stops, self._vocab_size, self._routing, self._requests, self._rollout
        )
        return self._pending

    def generate(self, request: GenerationRequest) -> list[Episode]:
        return self.submit(request).collect()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
        self._pending = None

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token but the first, at temperature 1; collective."""
        self._wait()
        self._restore()
        lengths = [len(s) for s in sequences]
        scored = [i for i, length in enumerate(lengths) if length > 1]
        dealt = [
            [scored[place] for place in part]
            for part in partition([lengths[i] for i in scored], self.fleet.count, equal_count=True)
        ]
        jobs = _by_tokens([i for s in self.fleet.mine for i in dealt[s]], lengths)
        answered = self._requests.collect(
            jobs,
            lambda api, job: api.score([sequences[i] for i in job]),
            _SCORES_AT_ONCE,
            may_interrupt=False,  # called by the sync check, after the updates of the step
        )
        values = [v for index in range(len(jobs)) for row in answered[index] for v in row]
        orders: list[list[int]] = [[] for _ in range(self._world)]
        for server, part in enumerate(dealt):
            orders[self.fleet.head_of(server)] += part
        return gather_logprobs(torch.tensor(values, dtype=torch.float32), orders, lengths)

    def turns(self) -> ServerTurns:
        self._wait()
        version = self._restore()
        how = self._stops, self._vocab_size, self._rollout.batch_size, self._routing
        return ServerTurns(self.fleet, version, *how)

    def sync_metrics(self) -> dict[str, float]:
        """See ``RolloutEngine.sync_metrics``; empty with ``rollout.sync_mode`` = full."""
        return self.slices.metrics() if self.slices is not None else {}

    def sleep(self) -> None:
        """Release the memory of servers that share the training devices."""
        if self.fleet.shares_devices:
            self._wait()
            self.fleet.for_training()
            if self._device.type != "cpu":
                self._synced = {}

    def stop(self) -> None:
        if self._pending is not None:
            self._pending.abort()
        self._transport.stop()
        if self.slices is not None:
            self.slices.transport.stop()
        self.fleet.stop()


def _error_of(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


def _by_tokens(indices: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Divide indices, in order, into requests of at most ``_SCORE_TOKENS`` tokens if possible."""
    jobs: list[list[int]] = []
    held = _SCORE_TOKENS + 1
    for index in indices:
        if held + lengths[index] > _SCORE_TOKENS:
            jobs.append([])
            held = 0
        jobs[-1].append(index)
        held += lengths[index]
    return jobs
