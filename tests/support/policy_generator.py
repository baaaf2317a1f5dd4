"""A small model as the endpoint's generator, with a record of everything it sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM

from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.local.decoding import decode
from mppo.rollout.local.sampling import row_keys
from mppo.rollout.turns import Turn


@dataclass(frozen=True, eq=False)
class Sampled:
    """A request and what was sampled for it."""

    given: tuple[int, ...]
    turn: Turn
    session: str = ""


@dataclass(eq=False)
class _Waiting:
    session: str
    given: tuple[int, ...]
    most: int
    answer: asyncio.Future[Turn]


def marks_of(ids: Sequence[int]) -> torch.Tensor:
    """In place of a token's experts its id and position, for all tokens but the last."""
    return torch.tensor(list(zip(ids[:-1], range(len(ids)))), dtype=torch.int16)[:, None]


@dataclass
class PolicyGenerator:
    """``builtin:tiny``, a ``Generator``; the requests that wait are sampled as one batch.

    Args:
        longest: most tokens of a turn, whatever a request asks for.
        stop_share: about this share of the sampled tokens ends a turn.
        delay_s: seconds before a turn is sampled.
        version: of the weights.
    """

    longest: int = 6
    stop_share: float = 0.2
    delay_s: float = 0.0
    version: int = 0
    sampled: list[Sampled] = field(default_factory=list)
    aborted: int = 0

    def __post_init__(self) -> None:
        folder = resolve_model("builtin:tiny")
        self.tokenizer = load_tokenizer(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        every = max(1, round(1 / self.stop_share))
        eos = self.tokenizer.eos_token_id
        self._stops = torch.tensor(sorted({eos, *range(7, len(self.tokenizer), every)}))
        self.waiting: list[_Waiting] = []
        self._drawn = 0

    async def generate(self, token_ids: Sequence[int], max_tokens: int, session: str) -> Turn:
        """See ``mppo.agents.endpoint.session.Generator``."""
        loop = asyncio.get_running_loop()
        mine = _Waiting(
            session, tuple(token_ids), min(max_tokens, self.longest), loop.create_future()
        )
        self.waiting.append(mine)
        try:
            await asyncio.sleep(self.delay_s)
            if not mine.answer.done():
                self._sample_waiting()
            return await mine.answer
        except asyncio.CancelledError:
            self.aborted += 1
            if mine in self.waiting:
                self.waiting.remove(mine)
            raise

    def _sample_waiting(self) -> None:
        rows, self.waiting = sorted(self.waiting, key=lambda row: len(row.given)), []
        numbers = torch.arange(self._drawn, self._drawn + len(rows))
        self._drawn += len(rows)
        found = decode(
            self._model,
            [torch.tensor(row.given) for row in rows],
            range(len(rows)),
            row_keys(0, numbers, torch.zeros_like(numbers)),
            SamplingConfig(),
            torch.tensor([row.most for row in rows]),
            self._stops,
        )
        for i, row in enumerate(rows):
            count = int(found.length_R[i])
            reason = "stop" if found.stopped_R[i] else "length"
            ids, logprobs = found.tokens[i, :count], found.logprobs[i, :count]
            experts = marks_of([*row.given, *ids.tolist()])
            turn = Turn(ids.clone(), logprobs.clone(), reason, self.version, experts=experts)
            self.sampled.append(Sampled(row.given, turn, row.session))
            row.answer.set_result(turn)

    def dictated(self, given: Sequence[int], text: str, stops: bool, session: str = "") -> Turn:
        """A turn with this text, as if it had been sampled: its log-probabilities are real."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id] if stops else ids
        logprobs = self.logprobs([*given, *ids])[len(given) - 1 :]
        reason = "stop" if stops else "length"
        turn = Turn(torch.tensor(ids, dtype=torch.int32), logprobs, reason, self.version)
        self.sampled.append(Sampled(tuple(given), turn, session))
        return turn

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of a sequence's tokens but the first, in one pass."""
        logits = self._model(torch.tensor([list(ids)])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, torch.tensor(list(ids))[1:, None])[:, 0]


@dataclass
class DictatedGenerator(PolicyGenerator):
    """Says given texts, one a turn, and ends each turn."""

    texts: list[str] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], max_tokens: int, session: str) -> Turn:
        """See ``mppo.agents.endpoint.session.Generator``."""
        return self.dictated(token_ids, self.texts.pop(0), True, session)
