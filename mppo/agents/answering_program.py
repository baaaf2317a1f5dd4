"""Episodes of an agent that answers the policy's turns (``rollout.agent.path``).

The policy generates a turn, the agent answers it, and so on. Tokens of the policy stay as the
engine sampled them, and the environment's are appended: an episode has one sequence.
"""

from __future__ import annotations

from dataclasses import replace

from mppo.agents.conversation import Conversation, Reply
from mppo.agents.endpoint.ask import Ask
from mppo.agents.endpoint.refusal import Refusal
from mppo.agents.endpoint.session import Session
from mppo.agents.episode_program import failed, opening_of
from mppo.agents.turn_answers import TurnAnswers
from mppo.batch.episode import EpisodeResult
from mppo.batch.prompt import Prompt
from mppo.rewards.function import extra_info
from mppo.rewards.response import shorten
from mppo.rollout.turns import EngineLost


class AnsweringProgram:
    """A ``Program`` that asks for the turns itself, and the agent for the answers; ``max_tokens``
    after a prompt include the environment's."""

    def __init__(self, answers: TurnAnswers, max_turns: int, max_tokens: int) -> None:
        self._answers, self._max_turns, self._max_tokens = answers, max_turns, max_tokens
        self.start, self.stop = answers.start, answers.stop

    async def run(self, session: Session, prompt: Prompt) -> EpisodeResult:
        """See ``Program.run``; InputError if the agent returned messages, and the tokenizer cannot
        render any."""
        prompts, messages = session.policy.prompts, opening_of(prompt)
        ids: list[int] = prompt.token_ids.tolist()
        end, known = len(ids) + self._max_tokens, Reply()
        for turn in range(1, self._max_turns + 1):
            ask = Ask(prompt=tuple(ids), max_tokens=end - len(ids))
            try:
                (choice,) = (await session.answer(ask)).choices
            except (Refusal, EngineLost) as error:
                return failed(f"the policy did not answer: {error}")
            said = choice.node.turn
            ids += said.ids.tolist()
            text, is_cut = prompts.decode(said.ids.tolist()), said.finish_reason != "stop"
            messages.append({"role": "assistant", "content": text})
            is_last = is_cut or turn == self._max_turns
            conversation = Conversation(
                text=text,
                messages=tuple(messages),
                turn=turn,
                is_last=is_last,
                is_cut=is_cut,
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                extra_info=extra_info(prompt),
                state=known.state,
            )
            reply = await self._answers.answer(conversation)
            if isinstance(reply, str):
                return failed(f"turn {turn}, {shorten(text)!r}: {reply}")
            reward = known.reward if reply.reward is None else reply.reward
            known = replace(reply, reward=reward, numbers={**known.numbers, **reply.numbers})
            if is_last or reply.environment is None:
                break
            more = await prompts.environment(reply.environment, ids[-1])
            if isinstance(more, str):
                return failed(f"turn {turn}, {shorten(text)!r}: {more}")
            # it is only worth its tokens if the policy can say something after it
            if len(ids) + len(more) >= end:
                session.is_used_up = True
                break
            if not more:
                break
            ids += more
            environment = reply.environment
            if isinstance(environment, str):
                environment = [{"role": "user", "content": environment}]
            messages += environment
        return EpisodeResult(known.reward, known.numbers, messages=tuple(messages))
