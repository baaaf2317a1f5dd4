"""Scores of responses by the reward model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.algos.token_axis import cumulative
from mppo.batch.batch import Sequences
from mppo.batch.episode import Episode
from mppo.batch.head_outputs import ValueOutputs
from mppo.data.chat_template import render_with
from mppo.hub.builtin import eos_id, load_tokenizer, resolve_model
from mppo.models.role import Role
from mppo.models.streamed_role import forward
from mppo.parallel.exchange import sum_over_ranks
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.model_shape import max_positions
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.reward_model import RewardModelNormalization
from mppo.rewards.division import ScoringError, exchange_results
from mppo.rewards.response import conversation, describe
from mppo.rewards.scorer import Scorer
from mppo.rewards.scores import ModelScore
from mppo.safety.input_error import InputError
from mppo.supervision.phase import phase

_KEY = "reward_model.apply_chat_template"


@dataclass(frozen=True)
class RewardModelTexts:
    """Prompt and response as tokens of the reward model; of an agent's episode its last sequence.

    With the same tokenizer and chat template as the actor's, they are the tokens that the actor
    read and wrote (``same_tokens``). Otherwise the response is decoded, and prompt and response are
    rendered and tokenised again; the score then belongs to the last token of the rendered text.

    ``chat_template``: render the messages with the reward model's chat template, else continue
    the actor's prompt. ``special_tokens``: tokenise texts with those that ``own`` adds. Of longer
    texts only the last ``max_length`` tokens are kept.
    """

    actors: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase
    same_tokens: bool
    chat_template: bool
    special_tokens: bool
    max_length: int | None = None

    def tokens(self, episodes: Sequence[Episode]) -> tuple[dict[int, Tensor], list[int]]:
        """Tokens of prompt and response. Collective: each rank renders and tokenises the responses
        that it holds; it gets their tokens, int64, by number, ascending, and the number of tokens
        of every response. ScoringError on every rank: the chat template failed, or rendered an
        empty text."""
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


class RewardModelScale:
    """``(score - mean) / std``.

    Sources: given numbers; the model's config, where training wrote the moments of its data
    (OpenRLHF ``normalize_reward``); or the responses of the initial policy (Ziegler et al. 2019,
    arXiv 1909.08593, section 2.2), measured once and then kept, in checkpoints too.
    """

    def __init__(self, config: RewardModelNormalization, hf_config: Any) -> None:
        self.mean: float | None = 0.0
        self.std = 1.0
        if config.mode == "given":
            self.mean, self.std = config.mean, config.std
        elif config.mode == "config":
            self.mean, self.std = float(hf_config.mean), float(hf_config.std)
        elif config.mode == "measured":
            self.mean = None
        self._measures = config.mode == "measured"

    def __call__(self, scores_B: Tensor) -> Tensor:
        """Scale scores, float32 ``[B]``. The first call of the mode ``measured`` measures them,
        except for numbers that are not finite; InputError if there are fewer than two different
        ones."""
        if self.mean is None:
            finite_B = scores_B[scores_B.isfinite()].double()
            std = finite_B.std().item() if len(finite_B) > 1 else 0.0
            if not std > 0:
                raise InputError(
                    f"the reward model gave {len(finite_B)} responses "
                    f"{'the same score' if len(finite_B) > 1 else 'a score'}: there is no standard "
                    "deviation to measure; set reward_model.normalize.mode to given or off"
                )
            self.mean, self.std = finite_B.mean().item(), std
        return ((scores_B.double() - self.mean) / self.std).float()

    def state_dict(self) -> dict[str, float] | None:
        if self.mean is None or not self._measures:
            return None
        return {"mean": self.mean, "std": self.std}

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """Restore measured moments; a scale of another mode keeps its numbers."""
        if state and self._measures:
            self.mean, self.std = float(state["mean"]), float(state["std"])


SCORING = "computing scores with reward_model"


@dataclass(frozen=True)
class RewardModelScorer:
    """Scores responses in a forward pass of the reward model. Normalised scores are clipped to
    [-clip, clip]; in the context of ``placed`` the parameters are on the device."""

    role: Role
    texts: RewardModelTexts
    scale: RewardModelScale
    clip: float | None = None
    placed: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, episodes: Sequence[Episode]) -> list[ModelScore]:
        """Score responses. Collective; ScoringError on every rank if the responses have no tokens
        of the reward model, or its scores no deviation."""
        with phase(SCORING):
            held, lengths = self.texts.tokens(episodes)
            homes = [each.home for each in episodes]
            with self.placed():
                raw_B = model_scores(self.role, scoring_batch(held, lengths, homes))
            try:
                scores_B = self.scale(raw_B)
            except ValueError as error:
                raise ScoringError(str(error)) from error
        if self.clip is not None:
            scores_B = scores_B.clamp(-self.clip, self.clip)
        return list(map(ModelScore, raw_B.tolist(), scores_B.tolist()))


def with_reward_model(
    scorer: Scorer,
    recipe: Recipe,
    texts: RewardModelTexts | None,
    role: Role | None,
    scale: RewardModelScale | None,
    placed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Scorer:
    """The scorer with the recipe's reward model, if it has one; for the other arguments see
    ``RewardModelScorer``."""
    if texts is None or role is None or scale is None:
        return scorer
    section = recipe.reward_model
    model = RewardModelScorer(role, texts, scale, section.clip, placed)
    return replace(scorer, model=model, model_weight=section.weight)


def model_scores(role: Role, batch: Sequences) -> Tensor:
    """The score of each text of a ``scoring_batch``, float32 ``[B]`` on the CPU of every rank: the
    output of the score head for its last token. Collective."""
    plan = role.plan(batch, training=False)
    share, inputs = role.fetch(batch, plan)
    outputs = forward(role, share, plan, inputs)
    assert isinstance(outputs, ValueOutputs)
    scores_H = outputs.values_T[batch.cu_seqlens[1:] - 1]
    if batch.is_replicated:
        return scores_H
    # each score has one home, so the sum over ranks is exact
    scores_B = torch.zeros(batch.num_sequences, dtype=torch.float64)
    scores_B[batch.held_H] = scores_H.double()
    return sum_over_ranks(scores_B).float()


def scoring_batch(
    held: Mapping[int, Tensor], lengths: Sequence[int], homes: Sequence[int]
) -> Sequences:
    """A batch of texts without responses, whose only values are those after the last tokens.

    The value at index t is that of the state before token t. Each sequence therefore has an end
    slot (``Batch.end_mask_T``), whose value is the output for the last token of the text; the slot
    repeats that token, and nothing reads it.

    Args:
        held: tokens of the texts on this rank, int64, by index, ascending.
        lengths, homes: of each text on all ranks: its tokens, and its rank (-1: every rank).
    """
    nothing = torch.empty(0, dtype=torch.int64)
    tokens_T = torch.cat([nothing, *(part for ids in held.values() for part in (ids, ids[-1:]))])
    lengths_B, held_H = torch.tensor(lengths) + 1, torch.tensor(list(held), dtype=torch.int64)
    cu_seqlens = cumulative(lengths_B[held_H])
    zeros_T = torch.zeros(len(tokens_T))
    end_mask_T = zeros_T.clone()
    end_mask_T[cu_seqlens[1:] - 1] = 1.0
    return Sequences(
        tokens_T=tokens_T,
        cu_seqlens=cu_seqlens,
        response_mask_T=zeros_T,
        end_mask_T=end_mask_T,
        held_H=held_H,
        lengths_B=lengths_B,
        response_B=torch.zeros_like(lengths_B),
        end_B=torch.ones_like(lengths_B),
        home_B=torch.tensor(homes, dtype=torch.int32),
    )
