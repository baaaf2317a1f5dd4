"""Responses on their way from SGLang servers to all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mppo.batch import ResponsesBySample, Trajectory
from mppo.config.sections.rollout import RolloutConfig
from mppo.parallel.partition import partition
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.sglang.answers import complete_prompts, gather_answers, joined
from mppo.rollout.sglang.api import ServerResponse, SGLangApi, sampling_parameters
from mppo.rollout.sglang.http_client import ServerLost
from mppo.rollout.sglang.in_flight import InFlightRequests
from mppo.rollout.sglang.requests import Requests
from mppo.rollout.sglang.routed_experts import RoutingShape
from mppo.rollout.sglang.straggler_abort import StragglerAbort

_JOBS_PER_SERVER = 32


class SGLangGeneration:
    """See ``rollout.engine.Generation``. The servers are asked at once; collective.

    Args:
        request: what is asked for.
        stops: tokens that end a response.
        routing: shape of the experts each answer carries; None: none.
        requests: the way to the servers.
        rollout: the recipe's section; with ``partial_rollout``, what is broken off goes on later.
    """

    def __init__(
        self,
        request: GenerationRequest,
        stops: tuple[int, ...],
        routing: RoutingShape | None,
        requests: Requests,
        rollout: RolloutConfig,
    ) -> None:
        self._request, self._stops, self._routing = request, stops, routing
        self._requests, self._rollout = requests, rollout
        self._partial = request.num_prompts_needed is not None and rollout.partial_rollout
        self._found = {row: t for row, t in request.resumed().items() if self._counts(t)}
        self._seconds = 0.0
        self._left_over: ResponsesBySample = {}
        self._flight: InFlightRequests | None = None
        self._launch()

    def _counts(self, response: Trajectory) -> bool:
        """Whether what is known of a response need not be generated again."""
        if response.finish_reason == "abort":
            return self._partial
        return self._routing is None or response.routed_experts is not None

    def _launch(self) -> None:
        """Ask this rank's servers for what is missing, if it is."""
        request = self._request
        enough = (
            len(request.prompts)
            if request.num_prompts_needed is None
            else request.num_prompts_needed
        )
        if len(complete_prompts(self._found, request)) >= enough:
            return
        self._version = self._requests.restore()
        self._tail = StragglerAbort(
            request.num_prompts_needed, request.sampling.n, self._requests.new_name()
        )
        rows = self._my_rows()
        ended = {row for row, t in self._found.items() if t.finish_reason != "abort"}
        done = ended.intersection(rows)
        self._tail.answered(sorted(done))
        rows = [row for row in rows if row not in done]
        servers = max(1, len(self._requests.fleet.mine))
        # enough requests to spread, few enough to cost little
        size = max(1, min(-(-len(rows) // (_JOBS_PER_SERVER * servers)), self._rollout.batch_size))
        self._jobs = [rows[start : start + size] for start in range(0, len(rows), size)]
        self._in_flight = max(1, self._rollout.batch_size // size)
        self._flight = self._requests.launch(self._jobs, self._ask, self._in_flight, self._tail)

    def _my_rows(self) -> list[int]:
        """Rows (``prompt * n + sample``) for this rank's servers, longest prompts first."""
        n, fleet = self._request.sampling.n, self._requests.fleet
        lengths = [len(prompt.token_ids) for prompt in self._request.prompts]
        dealt = partition(lengths, fleet.count, equal_count=True)
        mine = [index for server in fleet.mine for index in dealt[server]]
        mine.sort(key=lambda index: -lengths[index])
        return [index * n + sample for index in mine for sample in range(n)]

    def _ask(self, api: SGLangApi, job: list[int]) -> dict[int, ServerResponse]:
        """Have one server answer some rows; in any thread."""
        request, tail = self._request, self._tail
        if tail.reached.is_set():
            return {}
        texts, parameters = [], []
        for row in job:
            prompt, _ = request.sample_at(row)
            known = self._found[row].response_ids if row in self._found else ()
            texts.append(prompt.token_ids + known)
            limit = request.max_tokens - len(known)
            parameters.append(sampling_parameters(request.sampling, limit, self._stops))
        answers = api.generate(texts, parameters, self._routing is not None)
        _check_answers(api.url, answers, self._version, may_abort=tail.reached.is_set())
        answers = [a.settled(self._stops) for a in answers]
        ended = {r: a for r, a in zip(job, answers, strict=True) if a.reason != "abort"}
        if request.on_response is not None:
            told = {r: a.trajectory(request.sample_at(r)[0]) for r, a in ended.items()}
            request.on_response(
                list(told), [joined(self._found.get(r), t) for r, t in told.items()]
            )
        tail.answered(list(ended))
        return {r: a for r, a in zip(job, answers, strict=True) if a.tokens}

    def wait(self) -> None:
        """See ``rollout.engine.Generation.wait``."""
        if self._flight is None:
            return
        results = self._requests.landed(self._flight)
        found, self._flight = self._gathered(results), None
        self._found = {row: t for row, t in found.items() if self._counts(t)}
        self._left_over = self._request.left_over(self._found)

    def collect(self) -> list[Trajectory]:
        """See ``rollout.engine.Generation.collect``."""
        request, n = self._request, self._request.sampling.n
        if self._flight is None:
            self._launch()
        if self._flight is not None:
            results = self._requests.answers(
                self._jobs, self._ask, self._in_flight, self._tail, self._flight
            )
            self._found, self._flight = self._gathered(results), None
        taken = complete_prompts(self._found, request)[: request.num_prompts_needed]
        self._left_over = request.left_over(self._found, taken) if self._partial else {}
        found, self._found = self._found, {}
        return [found[prompt * n + sample] for prompt in taken for sample in range(n)]

    @property
    def left_over(self) -> ResponsesBySample:
        """See ``rollout.engine.Generation.left_over``."""
        return self._left_over

    @property
    def seconds(self) -> float:
        """See ``rollout.engine.Generation.seconds``."""
        return self._seconds

    def _gathered(
        self, results: Mapping[int, Mapping[int, ServerResponse]]
    ) -> dict[int, Trajectory]:
        """This rank's answers and everybody's, and what was known before; collective."""
        assert self._flight is not None
        requests = self._requests
        self._seconds = self._flight.seconds
        mine = {row: answer for part in results.values() for row, answer in part.items()}
        found = gather_answers(
            mine,
            self._request,
            self._version,
            self._found,
            self._routing,
            requests.device,
            requests.world,
            requests.group,
        )
        self._tail.forget()
        return found

    def drop(self) -> None:
        """Abort what is under way; nobody wants it."""
        if self._flight is not None:
            self._flight.drop()


def _check_answers(
    url: str, answers: Sequence[ServerResponse], version: int, may_abort: bool
) -> None:
    """Refuse what other weights generated, and what was aborted without having been told to.

    Raises:
        ServerLost: such an answer.
    """
    for answer in answers:
        if answer.weight_version != str(version):
            raise ServerLost(
                url, f"holds weights of version {answer.weight_version}, not {version}"
            )
        if answer.reason == "abort" and not may_abort:
            raise ServerLost(url, "gave up on a response")
