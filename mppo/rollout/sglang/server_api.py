"""The part of SGLang's HTTP interface that a trainer needs; SGLang itself is not imported."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.sglang.http_client import JsonClient, RequestRefused, ServerLost
from mppo.rollout.sglang.server_response import ServerResponse, parse_responses
from mppo.safety.bounded_http import parse_answer

_QUICK_S = 5.0
_IDLE_POLL_S = 0.05

WEIGHTS, KV_CACHE, CUDA_GRAPHS = "weights", "kv_cache", "cuda_graph"
MEMORY_TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPHS)
"""SGLang's names for the parts of its memory that it can release."""


def sampling_parameters(
    sampling: SamplingConfig, max_tokens: int, stop_tokens: Sequence[int]
) -> dict[str, Any]:
    return {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(stop_tokens),
    }


class SGLangApi:
    """Calls to one SGLang server. ``timeout_s``: longest time to an answer, in generation longest
    time without progress, seconds."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url
        self.client = JsonClient(url, api_key, timeout_s)
        self._has_sessions = True
        self._loads: Any = None
        self._progress_at = -math.inf

    def observe_progress(self) -> bool:
        """Whether the server has computed anything for its requests since the last call.

        The scheduler publishes its load after its batches. A load without requests is no progress:
        a request that the server has lost is not waited for longer than the limit.
        """
        try:
            answer = self.client.get("/v1/loads?include=core", timeout_s=_QUICK_S)
        except (ServerLost, RequestRefused):
            return False
        loads = answer.get("loads") if isinstance(answer, dict) else None
        stated = loads if isinstance(loads, list) else ()
        busy = [x for x in stated if isinstance(x, dict) and x.get("num_running_reqs")]
        moved = bool(busy) and busy != self._loads
        self._loads = busy
        if moved:
            self._progress_at = time.monotonic()
        return moved

    def _generate(self, body: dict[str, Any], parse: Callable[[bytes], Any] = parse_answer) -> Any:
        return self.client.post("/generate", body, None, lambda: self._progress_at, parse)

    def is_up(self) -> bool:
        """Whether the server answers a health check within a few seconds; RequestRefused if another
        program than an SGLang server answers."""
        try:
            self.client.get("/health", timeout_s=_QUICK_S)
        except ServerLost:
            return False
        return True

    def accepts_key(self) -> bool | None:
        """Whether the server accepts this client's key, which the health check does not need; None:
        no answer."""
        try:
            self.client.get("/model_info", timeout_s=_QUICK_S)
        except RequestRefused as error:
            return error.status != 401
        except ServerLost:
            return None
        return True

    def options(self) -> Mapping[str, Any]:
        """The options that the server was started with; empty if it does not tell them."""
        try:
            stated = self.client.get("/server_info")
        except RequestRefused:
            return {}
        return stated if isinstance(stated, dict) else {}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        parameters: dict[str, Any] | Sequence[dict[str, Any]],
        routed_experts: bool = False,
    ) -> list[ServerResponse]:
        """Generate one response to each prompt. ServerLost if there is no answer, it has another
        form, or the server failed to finish a response; all responses of the call are lost."""
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": parameters,
            "return_logprob": True,
        }
        if routed_experts:
            body["return_routed_experts"] = True
        found = self._generate(body, parse_responses) or []
        if len(found) != len(prompts):
            raise ServerLost(self.url, f"returned {len(found)} responses to {len(prompts)} prompts")
        return found

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token but the first, at temperature 1; NaN: not finite.
        ServerLost if there is no answer, or it has another form."""
        body = {
            "input_ids": [list(sequence) for sequence in sequences],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = self._generate(body)
        try:
            found = [[e[0] for e in a["meta_info"]["input_token_logprobs"][1:]] for a in answers]
            values = [[math.nan if v is None else float(v) for v in row] for row in found]
        except (LookupError, TypeError, ValueError) as error:
            raise ServerLost(self.url, f"returned no log-probabilities: {error!r}") from error
        expected = [len(sequence) - 1 for sequence in sequences]
        if [len(row) for row in values] != expected:
            raise ServerLost(self.url, "returned log-probabilities of other sequences")
        return values

    def abort_all(self) -> None:
        """Abort every running request; each returns its tokens with reason ``abort``."""
        self.client.post("/abort_request", {"abort_all": True}, timeout_s=_QUICK_S)

    def begin_update(self) -> None:
        """Open a weight update, if this version of SGLang has that call; one left open is closed
        first."""
        try:
            self._session("/begin_weight_update", {"selector": "all"})
        except RequestRefused as error:
            if "already open" not in str(error):
                raise
            self.end_update()
            self._session("/begin_weight_update", {"selector": "all"})

    def end_update(self) -> None:
        """Close the weight update: the server recomputes what it derives from weights."""
        self._session("/end_weight_update", {})

    def _session(self, path: str, body: dict[str, Any]) -> None:
        if not self._has_sessions:
            return
        try:
            self._succeed(path, body)
        except RequestRefused as error:
            if error.status != 404:
                raise
            self._has_sessions = False

    def update_from_tensor(
        self, payloads: Sequence[str], version: int, loader: str = "flattened_bucket"
    ) -> None:
        """Load one bucket from serialized handles, one per tensor-parallel rank, with a load format
        of SGLang's or a custom weight loader of the server."""
        self._succeed(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": list(payloads),
                "load_format": loader,
                "flush_cache": True,
                "weight_version": str(version),
            },
        )

    def join_group(
        self, address: str, port: int, rank_offset: int, world: int, name: str, backend: str
    ) -> None:
        """Make the server's ranks join a process group; returns once all members have joined."""
        self._succeed(
            "/init_weights_update_group",
            {
                "master_address": address,
                "master_port": port,
                "rank_offset": rank_offset,
                "world_size": world,
                "group_name": name,
                "backend": backend,
            },
        )

    def leave_group(self, name: str) -> None:
        """Make the server's ranks leave a process group."""
        self._succeed("/destroy_weights_update_group", {"group_name": name})

    def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        version: int,
    ) -> None:
        """Load one bucket, which is broadcast in the group as a single tensor during this call."""
        self._succeed(
            "/update_weights_from_distributed",
            {
                "names": list(names),
                "dtypes": list(dtypes),
                "shapes": [list(shape) for shape in shapes],
                "group_name": group,
                "flush_cache": True,
                "load_format": "flattened_bucket",
                "weight_version": str(version),
            },
        )

    def update_from_disk(self, folder: str, version: int) -> None:
        """Load a Hugging Face folder from a file system that the server sees."""
        body = {"model_path": folder, "load_format": "auto", "weight_version": str(version)}
        self._succeed("/update_weights_from_disk", body)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until the server computes nothing, and empty its cache of prefixes; ServerLost if
        that takes longer.

        After the answer to its last request, SGLang's scheduler still holds that batch for a
        moment. It stops with an assertion if memory is released before.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.client.post("/flush_cache", timeout_s=timeout_s)
                return
            except RequestRefused as error:
                if error.status != 400:  # "not idle"
                    raise
            if time.monotonic() > deadline:
                raise ServerLost(self.url, f"is not idle within {timeout_s:.0f} s")
            time.sleep(_IDLE_POLL_S)

    def release_memory(self, tags: Sequence[str]) -> None:
        """Release device memory (``MEMORY_TAGS``); the server must be idle."""
        self.client.post("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate released memory again."""
        self.client.post("/resume_memory_occupation", {"tags": list(tags)})

    def _succeed(self, path: str, body: dict[str, Any]) -> None:
        try:
            answer = self.client.post(path, body)
        except RequestRefused as error:
            if error.status != 404:
                raise
            raise RequestRefused(
                f"{error}; this version of SGLang has no such call: serve with 0.5.21, or set "
                "rollout.sync to another value",
                error.status,
            ) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RequestRefused(f"{self.url}{path}: {answer.get('message')}")
