"""Scores from a recipe's reward server, whatever its format, through its failures."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from mppo.recipe.remote_options import read_remote_options
from mppo.recipe.sections.remote import (
    ClassifierOptions,
    JudgeOptions,
    RemoteOptions,
    SandboxFusionOptions,
)
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.remote.classifier import load_classifier_format
from mppo.rewards.remote.json_exchange import RewardServer, ServerFailure
from mppo.rewards.remote.judge import JudgeFormat
from mppo.rewards.remote.sandbox_fusion import SandboxFusionFormat
from mppo.rewards.remote.wire import MppoFormat, OpenRLHFFormat, WireFormat
from mppo.rewards.response import Response, describe, shorten
from mppo.rewards.result import read_result
from mppo.rewards.scores import FailedScore
from mppo.supervision.phase import tick


class CircuitBreaker:
    """Counts requests that failed in a row, and refuses further ones after ``limit`` (None: never).

    After ``cool_down_s`` one request is admitted as a probe: if it succeeds, all are admitted
    again; if it fails, the time starts anew.
    """

    def __init__(
        self, limit: int | None, cool_down_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._cool_down_s, self._clock = limit, cool_down_s, clock
        self._lock = threading.Lock()
        self._failures, self._probing, self._probe_at = 0, False, 0.0
        self._last = ""

    def tries(self, most: int) -> int:
        """How often a request may be sent: ``most`` times, once as a probe, or not at all.
        ``succeeded`` or ``failed`` must follow unless it is 0."""
        with self._lock:
            if self._limit is None or self._failures < self._limit:
                return most
            if self._probing or self._clock() < self._probe_at:
                return 0
            self._probing = True
            return 1

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._probing = 0, False

    def failed(self, why: str) -> None:
        """Note a request that failed after its retries."""
        with self._lock:
            self._failures += 1
            self._last = why
            self._probing, self._probe_at = False, self._clock() + self._cool_down_s

    def describe(self) -> str:
        with self._lock:
            return (
                f"no request is sent, because the last {self._failures} failed "
                f"(reward.kwargs.max_failures); the last one: {self._last}"
            )


class RemoteReward:
    """Sends responses to a reward server, several requests at a time.

    Every response gets its own score or a ``FailedScore``: answers are matched with their
    requests, and responses whose score is missing or not a number are sent again.
    """

    def __init__(self, server: RewardServer, wire: WireFormat, options: RemoteOptions) -> None:
        self._server, self._wire, self._options = server, wire, options
        self._breaker = CircuitBreaker(options.max_failures, options.cool_down_s)
        self._random = random.Random()  # apart from the run's random numbers

    def __call__(self, responses: Sequence[Response]) -> list[Any]:
        parts = self._wire.items(responses)
        items = [item for part in parts for item in part]
        asked = [item for item in items if not isinstance(item, FailedScore)]
        answers = iter(self._score(asked))
        results = []
        for response, part in zip(responses, parts, strict=True):
            mine = [each if isinstance(each, FailedScore) else next(answers) for each in part]
            results.append(self._combine(response, mine))
        return results

    def _combine(self, response: Response, results: Sequence[Any]) -> Any:
        for result in results:
            if isinstance(result, FailedScore):
                return FailedScore(
                    f"no score for {describe(response.prompt)}, response "
                    f"{shorten(response.text)!r}: {result.message}"
                )
        return self._wire.combine(results)

    def _score(self, items: Sequence[Any]) -> list[Any]:
        size, abandoned = self._options.batch_size, threading.Event()
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        world = dist.get_world_size() if dist.is_initialized() else 1
        threads = max(1, self._options.concurrency // world)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="reward request")
        results: list[Any] = []
        try:
            for future in [pool.submit(self._request, batch, abandoned) for batch in batches]:
                results += future.result()
                tick()
        finally:
            abandoned.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return results

    def _request(self, items: Sequence[Any], abandoned: threading.Event) -> list[Any]:
        """The results of a batch; ``FailedScore`` for items that the server did not score."""
        tries = self._breaker.tries(self._options.retries + 1)
        if not tries:
            why = f"the reward server {self._server.shown_url}: {self._breaker.describe()}"
            return [FailedScore(why)] * len(items)
        try:
            results = self._exchange_with_retries(items, tries, abandoned)
        except ServerFailure as error:
            if error.of_items:
                self._breaker.succeeded()
                if len(items) > 1:  # find the ones that the server does not accept
                    half = len(items) // 2
                    first = self._request(items[:half], abandoned)
                    return first + self._request(items[half:], abandoned)
            else:
                self._breaker.failed(str(error))
            return [FailedScore(str(error))] * len(items)
        self._breaker.succeeded()
        return results

    def _exchange_with_retries(
        self, items: Sequence[Any], tries: int, abandoned: threading.Event
    ) -> list[Any]:
        """The results of a batch, whose requests are repeated until each is a score; ServerFailure
        if no request had a usable answer."""
        results: dict[int, Any] = {}
        pending, failure = list(range(len(items))), None
        for attempt in range(tries):
            if attempt and abandoned.wait(self._delay(attempt)):
                break
            try:
                found = self._exchange([items[index] for index in pending])
            except ServerFailure as error:
                times = f" {attempt + 1} times, last" if attempt else ""
                message = f"the reward server {self._server.shown_url} failed{times}: {error}"
                failure = ServerFailure(message, error.retry, error.of_items)
                if not error.retry:
                    break
                continue
            results.update(zip(pending, found, strict=True))
            pending = [i for i in pending if not _is_final(results[i])]
            if not pending:
                break
        if not results:
            assert failure is not None
            raise failure
        return [results[index] for index in range(len(items))]

    def _exchange(self, items: Sequence[Any]) -> list[Any]:
        name = secrets.token_hex(8)
        ids = [f"{name}-{index}" for index in range(len(items))]
        answer = self._server.post(self._wire.body(items, ids))
        try:
            return self._wire.read(answer, items, ids)
        except ValueError as error:
            raise ServerFailure(self._server.quote(str(error))) from None

    def _delay(self, attempt: int) -> float:
        options = self._options
        longest = min(options.backoff_s * 2 ** min(attempt - 1, 60), options.max_backoff_s)
        return longest * self._random.uniform(0.5, 1.0)


def _is_final(result: Any) -> bool:
    """Whether a retry could not give a better result."""
    if isinstance(result, FailedScore):
        return True
    try:
        read_result(result)
    except ValueError:
        return False
    return True


def build_remote_reward(reward: RewardConfig) -> RemoteReward:
    """Build the client of a recipe's reward server; ConfigError for an invalid URL or option, or if
    there is no such environment variable or tokenizer."""
    options = read_remote_options(reward)
    server = RewardServer(str(reward.url), reward.timeout_s, options.api_key_env)
    wire: WireFormat
    if isinstance(options, SandboxFusionOptions):
        wire = SandboxFusionFormat(options)
    elif isinstance(options, ClassifierOptions):
        wire = load_classifier_format(options)
    elif isinstance(options, JudgeOptions):
        wire = JudgeFormat(options)
    else:
        wire = OpenRLHFFormat() if reward.server_format == "openrlhf" else MppoFormat()
    return RemoteReward(server, wire, options)
