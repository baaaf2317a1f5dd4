"""Conversations: a rollout engine generates turns, and an agent answers them.

All conversations of a request take their turns together: the engine generates the next turn of
those that go on, then each rank's agent answers those that lie on it. Tokens of the policy stay as
the engine sampled them; tokens of the environment are appended with ``NO_WEIGHTS`` as the version
of their weights, which takes them out of every loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mppo.agents.conversation import Conversation, Message, Reply
from mppo.agents.turn_text import TurnText
from mppo.batch.episode import NO_WEIGHTS, OPEN, Episode, EpisodeResult, EpisodeTokens
from mppo.parallel.collectives import raise_on_any_rank, wait_for_ranks
from mppo.rewards.function import extra_info
from mppo.rewards.response import describe, shorten
from mppo.rollout.engine import EngineAround, GenerationRequest, RolloutEngine
from mppo.rollout.local.engine import LocalGeneration
from mppo.rollout.response_gather import gather_episodes, left_over

Agent = Callable[[Sequence[Conversation]], Sequence[Reply | str]]
"""Returns for each conversation the agent's reply, or why there is none."""


@dataclass
class _Talk:
    """What the rank that holds a conversation remembers of it between turns."""

    messages: list[Message]
    state: Any = None
    reward: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)

    def take(self, reply: Reply) -> None:
        """Take over what a reply says besides the environment's turn."""
        self.state = reply.state
        self.reward = self.reward if reply.reward is None else reply.reward
        self.numbers.update(reply.numbers)


class ConversationEngine(EngineAround):
    """A rollout engine whose responses are conversations with an agent; a ``RolloutEngine``.

    Args:
        engine: generates the turns of the policy.
        agent: answers them.
        name: of the agent, for messages.
        turn_text: tokenises the environment's turns.
        max_turns: most turns of the policy.
        world: number of ranks.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        agent: Agent,
        name: str,
        turn_text: TurnText,
        max_turns: int,
        *,
        world: int = 1,
    ) -> None:
        super().__init__(engine)
        self._agent, self._name = agent, name
        self._turn_text, self._max_turns = turn_text, max_turns
        self._world = world

    def generate(self, request: GenerationRequest) -> list[Episode]:
        """See ``RolloutEngine.generate``. ``on_response`` gets conversations that have ended.

        Raises:
            RuntimeError: on every rank, if the agent's processes or the chat template failed.
        """
        assert request.num_prompts_needed is None, "conversations are not aborted"
        part = replace(request, on_response=None)
        talks: dict[int, _Talk] = {}
        running: Iterable[int] = range(len(request.prompts) * request.sampling.n)
        for turn in range(1, self._max_turns + 1):
            found = self._engine.generate(part)
            here = {key: found[key] for key in running if found[key].tokens is not None}
            for key, episode in here.items():
                if turn == 1:
                    messages = episode.prompt.messages
                    opening = {"role": "user", "content": episode.prompt.text}
                    talks[key] = _Talk(list(messages) or [opening])
            answered = self._answer(here, talks, turn, request.max_tokens)
            for key, each in gather_episodes(answered, request, self._world).items():
                found[key] = each
            if request.on_response is not None:
                ended = {key: each for key, each in answered.items() if each.finish_reason != OPEN}
                request.on_response(list(ended), list(ended.values()))
            running = [key for key, each in enumerate(found) if each.is_unfinished]
            if not running:
                break
            part = replace(part, resumable=left_over(request, dict(enumerate(found))))
        return found

    def submit(self, request: GenerationRequest) -> LocalGeneration:
        """See ``RolloutEngine.submit``; generates in this thread before it returns."""
        start = time.perf_counter()
        found = self.generate(request)
        seconds = time.perf_counter() - start
        return LocalGeneration(request, found, seconds, self._world)

    def _answer(
        self,
        here: Mapping[int, Episode],
        talks: Mapping[int, _Talk],
        turn: int,
        limit: int,
    ) -> dict[int, Episode]:
        """Let the agent answer a turn of the conversations on this rank.

        Args:
            here: conversations by index in the result.
            talks: what is remembered of them.
            turn: number of the turn.
            limit: most tokens after a prompt.

        Returns:
            The conversations: ended, or with the environment's turn.

        Raises:
            RuntimeError: on every rank. Collective for this reason.
        """
        error, answered = None, dict(here)
        # a failure on one rank is raised on all: the others wait in the next collective
        try:
            replies = self._replies(here, talks, turn)
            says = {
                key: reply.environment
                for key, reply in replies.items()
                if isinstance(reply, Reply)
                and reply.environment is not None
                and here[key].finish_reason == "stop"
                and turn < self._max_turns
            }
            last_tokens = [int(here[key].here.ids[-1]) for key in says]
            found = self._turn_text.token_ids(list(says.values()), last_tokens)
            appended: dict[int, Sequence[int]] = {}
            for key, ids in zip(says, found, strict=True):
                if isinstance(ids, str):
                    replies[key] = self._failure(here[key], turn, talks[key].messages, ids)
                else:
                    appended[key] = ids
            for key, episode in here.items():
                answered[key] = self._continued(
                    episode, replies[key], appended.get(key), talks[key], limit
                )
                if answered[key].finish_reason == OPEN:
                    talks[key].messages += as_messages(says[key])
        except Exception as failure:
            error = str(failure)
            if not isinstance(failure, RuntimeError | ValueError):  # these are messages to users
                error = f"the agent {self._name}: {type(failure).__name__}: {failure}"
        wait_for_ranks(self._world)  # agents may take longer than any time limit
        raise_on_any_rank(error, self._world)
        return answered

    def _replies(
        self, here: Mapping[int, Episode], talks: Mapping[int, _Talk], turn: int
    ) -> dict[int, Reply | str]:
        """The agent's replies to the last turns, or why there is none."""
        if not here:
            return {}
        turns = [last_turn(episode) for episode in here.values()]
        texts = self._turn_text.decode(turns)
        conversations = []
        for (key, episode), text in zip(here.items(), texts, strict=True):
            talk, prompt = talks[key], episode.prompt
            talk.messages.append({"role": "assistant", "content": text})
            is_cut = episode.finish_reason != "stop"
            conversation = Conversation(
                text=text,
                messages=tuple(talk.messages),
                turn=turn,
                is_last=is_cut or turn == self._max_turns,
                is_cut=is_cut,
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                extra_info=extra_info(prompt),
                state=talk.state,
            )
            conversations.append(conversation)
        found = dict(zip(here, self._agent(conversations), strict=True))
        for key, reply in found.items():
            if isinstance(reply, Reply):
                talks[key].take(reply)
            else:
                found[key] = self._failure(here[key], turn, talks[key].messages, reply)
        return found

    def _failure(self, episode: Episode, turn: int, messages: Sequence[Message], why: str) -> str:
        """What went wrong after the policy's turn, the last of the messages."""
        text = shorten(messages[-1]["content"])
        where = f"{describe(episode.prompt)}, turn {turn}, {text!r}"
        return f"the agent {self._name} failed on {where}: {why}"

    def _continued(
        self,
        episode: Episode,
        reply: Reply | str,
        ids: Sequence[int] | None,
        talk: _Talk,
        limit: int,
    ) -> Episode:
        """A conversation after the agent's reply; ``ids``: the environment's tokens, if any."""
        if isinstance(reply, str):
            return replace(episode, result=EpisodeResult(error=reply))
        # the environment's turn is only worth its tokens if the policy can say something after it
        fits = ids is not None and episode.length + len(ids) < limit
        if fits and ids:
            said = EpisodeTokens(torch.tensor(ids), torch.zeros(len(ids)), episode.here.experts)
            more = Episode.sampled(episode.prompt, said, OPEN, NO_WEIGHTS)
            return episode.followed_by(more)
        reason = episode.finish_reason if ids is None or fits else "length"
        result = EpisodeResult(talk.reward, dict(talk.numbers), messages=tuple(talk.messages))
        return replace(episode, finish_reason=reason, result=result)


def as_messages(environment: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An environment's turn as messages; a text is a user's."""
    if isinstance(environment, str):
        return [{"role": "user", "content": environment}]
    return environment


def last_turn(episode: Episode) -> list[int]:
    """The tokens of the policy's last turn."""
    count = 0
    for version, tokens in reversed(episode.parts):
        if version == NO_WEIGHTS:
            break
        count += tokens
    return episode.here.ids[episode.length - count :].tolist()
