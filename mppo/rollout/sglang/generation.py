"""Generation by SGLang servers: requests, responses, and what is left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mppo.batch.episode import Episode, EpisodesBySample
from mppo.batch.shares import bring_episodes
from mppo.parallel.collectives import raise_on_any_rank
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.response_gather import (
    AnsweredPrompts,
    complete_prompts,
    gather_episodes,
    left_over,
)
from mppo.rollout.sglang.http_client import RequestRefused, ServerLost
from mppo.rollout.sglang.requests import InFlightRequests, Requests, StragglerAbort
from mppo.rollout.sglang.server_api import SGLangApi, sampling_parameters
from mppo.rollout.sglang.server_response import RoutingShape, ServerResponse, decode_routed_experts
from mppo.rollout.turns import deal_prompts

_JOBS_PER_SERVER = 32


class SGLangGeneration:
    """See ``rollout.engine.Generation``. The constructor sends the requests; collective.

    With ``max_staleness``, aborted responses are continued by a later request.
    """

    def __init__(
        self,
        request: GenerationRequest,
        stop_tokens: tuple[int, ...],
        vocab_size: int,
        routing: RoutingShape | None,
        requests: Requests,
        rollout: RolloutConfig,
    ) -> None:
        self._request, self._stop_tokens, self._routing = request, stop_tokens, routing
        self._vocab_size = vocab_size
        self._requests, self._rollout = requests, rollout
        self._partial = request.num_prompts_needed is not None and rollout.max_staleness > 0
        self._found = self._resumed()
        self.seconds = 0.0
        self.left_over: EpisodesBySample = {}
        self._is_collected = False
        self._in_flight: InFlightRequests | None = None
        self._launch(self._lacks_prompts() if request.among is None else self._missing())

    def _resumed(self) -> dict[int, Episode]:
        """The resumable responses that need not be generated again; collective."""
        resumed, routes = self._request.resumed(), self._routing is not None
        usable = [
            key
            for key, each in resumed.items()
            if (self._partial if each.finish_reason == "abort" else each.routed or not routes)
        ]
        return take_up(resumed, usable, self._homes(), self._requests.world)

    def _missing(self) -> bool:
        """Whether a response is missing; every rank has the same ones, and so the same answer."""
        done = sum(not each.is_unfinished for each in self._found.values())
        return done < len(self._request.prompts) * self._request.sampling.n

    def _lacks_prompts(self) -> bool:
        needed = self._request.num_prompts_needed
        needed = self._request.choice if needed is None else needed
        return len(complete_prompts(self._found, self._request)) < needed

    def _launch(self, wanted: bool) -> None:
        if not wanted:
            return
        request = self._request
        # all responses of this launch must come from this one version
        self._version = self._requests.restore()
        answered = AnsweredPrompts(request)
        self._stragglers = StragglerAbort(answered)
        # the count is over all ranks: each adds the finished responses among its own rows
        rows = self._my_rows()
        ended = {row for row, each in self._found.items() if not each.is_unfinished}
        done = ended.intersection(rows)
        answered.add(sorted(done))
        rows = [row for row in rows if row not in done]
        servers = max(1, len(self._requests.fleet.mine))
        # enough requests to balance the servers, few enough to keep the overhead small
        size = max(1, min(-(-len(rows) // (_JOBS_PER_SERVER * servers)), self._rollout.batch_size))
        self._jobs = [rows[start : start + size] for start in range(0, len(rows), size)]
        # ``batch_size`` bounds the responses that a server generates at once, not its requests
        self._max_in_flight = max(1, self._rollout.batch_size // size)
        self._in_flight = self._requests.launch(
            self._jobs, self._answer_rows, self._max_in_flight, self._stragglers
        )

    def _my_rows(self) -> list[int]:
        """Rows (``prompt * n + sample``) of this rank's servers: those that the result may hold,
        then the others, of both the longest prompts first."""
        n, choice = self._request.sampling.n, self._request.choice
        lengths = [len(prompt.token_ids) for prompt in self._request.prompts]
        mine = [row for row, rank in self._homes().items() if rank == self._requests.rank]
        return sorted(mine, key=lambda row: (row // n >= choice, -lengths[row // n], row))

    def _homes(self) -> dict[int, int]:
        """The rank whose servers generate each row; the prompts are dealt out to the servers."""
        request, heads = self._request, self._requests.fleet.heads
        return deal_prompts(request.prompts, request.sampling.n, heads)

    def _answer_rows(self, api: SGLangApi, job: list[int]) -> dict[int, ServerResponse]:
        """Make one server answer some rows; runs in any thread."""
        request, stragglers = self._request, self._stragglers
        if stragglers.reached.is_set():
            return {}
        texts, parameters = [], []
        for row in job:
            prompt, _ = request.sample_at(row)
            before = self._begun(row)
            known = prompt.token_ids[:0] if before is None else before.here.ids
            # a response that is continued is part of the prompt, and shortens what may follow
            texts.append(torch.cat([prompt.token_ids, known]).tolist())
            limit = request.max_tokens - len(known)
            parameters.append(sampling_parameters(request.sampling, limit, self._stop_tokens))
        answers = api.generate(texts, parameters, self._routing is not None)
        may_abort = stragglers.reached.is_set()
        for answer, given in zip(answers, parameters, strict=True):
            # others may have restarted the server, which then has other weights
            fault = answer.fault(given["max_new_tokens"], self._vocab_size, self._version)
            if answer.reason == "abort" and not may_abort:
                fault = fault or "gave up on a response"
            if fault:
                raise ServerLost(api.url, fault)
        answers = [a.with_final_reason(self._stop_tokens) for a in answers]
        ended = {r: a for r, a in zip(job, answers, strict=True) if a.reason != "abort"}
        if request.on_response is not None:
            new = [a.episode(request.sample_at(r)[0]) for r, a in ended.items()]
            begun = map(self._begun, ended)
            joined = [a if b is None else b.followed_by(a) for a, b in zip(new, begun)]
            request.on_response(list(ended), joined)
        stragglers.answered.add(list(ended))
        return {r: a for r, a in zip(job, answers, strict=True) if len(a.tokens)}

    def _begun(self, row: int) -> Episode | None:
        found = self._found.get(row)
        return None if found is None or found.tokens is None else found

    def wait(self) -> None:
        if self._is_collected:
            return
        if self._in_flight is not None:
            if self._partial:
                # what is unfinished goes on later, with the next weights
                self._stragglers.reached.set()
            results = self._requests.join(self._in_flight)
            self._found, self._in_flight = self._gathered(results), None
        if not self._partial:
            self._found = {r: e for r, e in self._found.items() if e.finish_reason != "abort"}
        self.left_over = left_over(self._request, self._found)

    def collect(self) -> list[Episode]:
        request, n = self._request, self._request.sampling.n
        if self._in_flight is None:
            self._launch(self._lacks_prompts())
        if self._in_flight is not None:
            self._stragglers.when_enough()
            results = self._requests.collect(
                self._jobs,
                self._answer_rows,
                self._max_in_flight,
                self._stragglers,
                self._in_flight,
            )
            self._found, self._in_flight = self._gathered(results), None
        taken = complete_prompts(self._found, request)[: request.num_prompts_needed]
        left = left_over(request, self._found, taken)
        self.left_over = left if self._partial else {}
        found, self._found, self._is_collected = self._found, {}, True
        return [found[prompt * n + sample] for prompt in taken for sample in range(n)]

    def _gathered(self, results: Mapping[int, Mapping[int, ServerResponse]]) -> dict[int, Episode]:
        """All ranks' responses, joined with those known before; collective."""
        assert self._in_flight is not None
        requests = self._requests
        self.seconds = self._in_flight.seconds
        mine = {row: answer for part in results.values() for row, answer in part.items()}
        found = add_answers(self._found, mine, self._request, self._routing, requests.world)
        self._stragglers.answered.close()
        return found

    def abort(self) -> None:
        if self._in_flight is not None:
            self._in_flight.abort()


def take_up(
    resumed: Mapping[int, Episode], usable: Sequence[int], homes: Mapping[int, int], world: int
) -> dict[int, Episode]:
    """The ``usable`` responses of an earlier request, by index in the result; collective. Finished
    ones stay at home; those to be continued move to the ranks that will continue them."""
    found = {key: resumed[key] for key in usable}
    begun = [key for key in usable if found[key].is_unfinished]
    wanted: list[list[int]] = [[] for _ in range(world)]
    for number, key in enumerate(begun):
        wanted[homes[key]].append(number)
        found[key] = found[key].elsewhere(homes[key])
    came = bring_episodes([resumed[key] for key in begun], wanted)
    return found | {begun[number]: each for number, each in came.items()}


def add_answers(
    known: Mapping[int, Episode],
    mine: Mapping[int, ServerResponse],
    request: GenerationRequest,
    routing: RoutingShape | None,
    world: int,
) -> dict[int, Episode]:
    """Responses by ``prompt * n + sample``: those known, continued by ``mine``, and what all ranks
    received. Collective; on every rank RuntimeError if routed experts are missing, and ValueError
    if a log-probability is not finite."""
    received: dict[int, Episode] = {}
    error = None
    for key, answer in mine.items():
        response = answer.episode(request.sample_at(key)[0])
        if key in known and known[key].tokens is not None:
            response = known[key].followed_by(response)
        # the tokens of an aborted response are routed again when it is continued
        if routing is not None and answer.reason != "abort":
            # all but the last token
            tokens = len(response.prompt.token_ids) + response.length - 1
            try:
                experts = decode_routed_experts(answer.routed_experts, routing, tokens)
            except RequestRefused as refused:
                error = str(refused)
                break
            response = response.with_experts(experts)
        received[key] = response
    if routing is not None:
        raise_on_any_rank(error, world)
    # a response that was continued may have another home than its beginning
    return {**known, **gather_episodes(received, request, world)}
