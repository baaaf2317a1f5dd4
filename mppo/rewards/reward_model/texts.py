"""The tokens that the reward model reads for a response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.batch.episode import Episode
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.schema import Recipe
from mppo.data.chat_template import render_with
from mppo.hub.builtin import eos_id, load_tokenizer, resolve_model
from mppo.rewards.division import exchange_results
from mppo.rewards.response import conversation, describe
from mppo.safety.input_error import InputError
from mppo.weights.shape import max_positions

_KEY = "reward_model.apply_chat_template"


@dataclass(frozen=True)
class RewardModelTexts:
    """Prompt and response as tokens of the reward model; of an agent's episode its last sequence.

    With the same tokenizer and chat template as the actor's, they are the tokens that the actor
    read and wrote (``same_tokens``). Otherwise the response is decoded, and prompt and response are
    rendered and tokenised again; the score then belongs to the last token of the rendered text.

    Args:
        chat_template: render the messages with the reward model's chat template; false:
            continue the actor's prompt with the response.
        special_tokens: tokenise texts with the special tokens that ``own`` adds.
        max_length: most tokens; of a longer text only the last ones are kept. None: no limit.
    """

    actors: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase
    same_tokens: bool
    chat_template: bool
    special_tokens: bool
    max_length: int | None = None

    def tokens(self, episodes: Sequence[Episode]) -> tuple[dict[int, Tensor], list[int]]:
        """Tokens of prompt and response.

        Collective: each rank renders and tokenises the responses that it holds; it gets their
        tokens, int64, by number, ascending, and the number of tokens of every response.

        Raises:
            ScoringError: on every rank: the chat template failed, or rendered an empty text.
        """
        held: dict[int, Tensor] = {}
        failure: Exception | None = None
        try:
            mine = {n: each for n, each in enumerate(episodes) if each.tokens is not None}
            held = dict(zip(mine, self._tokens(list(mine.values())), strict=True))
        except Exception as error:  # raised after the exchange, in which the other ranks wait
            failure = error
        found = {number: len(ids) for number, ids in held.items()}
        lengths: dict[int, int] = {}
        for theirs in exchange_results(found, failure):
            lengths.update(theirs)
        return held, [lengths[number] for number in range(len(episodes))]

    def _tokens(self, episodes: Sequence[Episode]) -> list[Tensor]:
        if self.same_tokens:
            found = [torch.cat([each.prompt.token_ids, each.here.ids]).long() for each in episodes]
        else:
            found = self._tokenize(episodes) if episodes else []
        return [ids if self.max_length is None else ids[-self.max_length :] for ids in found]

    def _tokenize(self, episodes: Sequence[Episode]) -> list[Tensor]:
        responses = self.actors.batch_decode(
            [each.here.ids.tolist() for each in episodes], skip_special_tokens=True
        )
        if self.chat_template:
            conversations = [
                _messages(each, response) for each, response in zip(episodes, responses)
            ]
            texts = render_with(self.own, conversations, _KEY, add_generation_prompt=False)
            ids = self.own(texts, add_special_tokens=False)["input_ids"]
        else:
            texts = [self._text(each, response) for each, response in zip(episodes, responses)]
            ids = self.own(texts, add_special_tokens=self.special_tokens)["input_ids"]
            ids = [self._ended(one, each) for one, each in zip(ids, episodes)]
        for one, each in zip(ids, episodes):
            if not one:
                raise InputError(
                    f"{describe(each.prompt)} and its response are no token of the reward model; "
                    "correct its chat template"
                )
        return [torch.tensor(one) for one in ids]

    def _text(self, episode: Episode, response: str) -> str:
        """Prompt and response; an agent's last sequence may begin with more than the prompt."""
        if episode.result is None:
            return episode.prompt.text + response
        before = episode.prompt.token_ids.tolist()
        return str(self.actors.decode(before, skip_special_tokens=True)) + response

    def _ended(self, ids: list[int], episode: Episode) -> list[int]:
        """The tokens with the end-of-sequence token behind a response that ended by itself."""
        end = eos_id(self.own)
        ends = episode.finish_reason == "stop" and ids[-1:] != [end]
        return [*ids, end] if ends else ids


def reward_model_texts(
    recipe: Recipe, actors: PreTrainedTokenizerBase, hf_config: Any
) -> RewardModelTexts | None:
    """Read the reward model's tokenizer, and choose how its tokens are made; None without a reward
    model. ConfigError if the tokenizer is missing, or the chat template that the recipe needs."""
    section, data = recipe.reward_model, recipe.data
    if section.path is None or not section.in_use:
        return None
    folder = section.tokenizer_path or resolve_model(section.path)
    try:
        own = load_tokenizer(folder, recipe.model.trust_remote_code)
    except ConfigError as error:
        key = "reward_model.tokenizer_path"
        raise ConfigError([replace(issue, key=key) for issue in error.issues]) from error
    templated = section.apply_chat_template
    templated = data.apply_chat_template if templated is None else templated
    if templated and not own.chat_template:
        why = "the reward model's tokenizer has no chat template"
        fix = f"set {_KEY}=false, or reward_model.tokenizer_path to a tokenizer with one"
        raise ConfigError([ConfigIssue(_KEY, section.apply_chat_template, why, fix)])
    same_text = not templated or (
        data.apply_chat_template and own.chat_template == actors.chat_template
    )
    return RewardModelTexts(
        actors,
        own,
        same_tokens=same_text and _vocabulary(own) == _vocabulary(actors),
        chat_template=templated,
        special_tokens=not data.apply_chat_template,
        max_length=section.max_length or max_positions(hf_config),
    )


def _messages(episode: Episode, response: str) -> tuple[Mapping[str, Any], ...]:
    said = () if episode.result is None else episode.result.messages
    return said or conversation(episode.prompt, response)


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What decides how a text becomes tokens; equal for tokenizers that give equal tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return type(tokenizer).__name__, tokenizer.get_vocab()
    rules = json.loads(backend.to_str())
    # padding and truncation are those of the last call
    return {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}
