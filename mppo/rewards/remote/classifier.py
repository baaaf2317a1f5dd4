"""A sequence classification model behind SGLang's ``/classify`` (a server with
``--is-embedding``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.data.chat_template import render_with
from mppo.hub.builtin import eos_id, load_tokenizer, resolve_model
from mppo.hub.tokenizing import tokens_of
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.sections.remote import ClassifierOptions
from mppo.rewards.remote.wire import WireFormat
from mppo.rewards.response import Response, conversation
from mppo.rewards.scores import FailedScore
from mppo.safety.input_error import InputError

_KEY = "reward.kwargs.apply_chat_template"


class ClassifierFormat(WireFormat):
    """SGLang's endpoint for reward models: tokens in, the score of the last token out.
    ``tokenizer`` is the model's own; its chat template renders prompt and response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ClassifierOptions) -> None:
        self._tokenizer, self._options = tokenizer, options

    def items(self, responses: Sequence[Response]) -> list[list[Any]]:
        if not responses:
            return []
        limit = self._options.max_length
        ids = scored_tokens(self._tokenizer, responses, self._options.apply_chat_template, _KEY)
        nothing = FailedScore("prompt and response are no token of the reward model")
        return [[one if limit is None else one[-limit:]] if one else [nothing] for one in ids]

    def body(self, items: Sequence[Any], ids: Sequence[str]) -> Any:
        return {"input_ids": list(items), "rid": list(ids)}

    def read(self, answer: Any, items: Sequence[Any], ids: Sequence[str]) -> list[Any]:
        """The only number of each result, by its id."""
        found = answer if isinstance(answer, list) else [answer]
        scores: dict[Any, Any] = {}
        for each in found:
            if not isinstance(each, dict) or not isinstance(each.get("meta_info"), dict):
                raise InputError("it must answer with a list of objects with 'meta_info'")
            scores[str(each["meta_info"].get("id"))] = each.get("embedding")
        if len(found) != len(ids) or scores.keys() != set(ids):
            raise InputError("it must answer with one result for each id of the request")
        return [_only(scores[name]) for name in ids]


def scored_tokens(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[Response], templated: bool, key: str
) -> list[list[int]]:
    """Tokens of prompt and response for a reward model: with ``templated`` the conversation by the
    tokenizer's chat template, which ``key`` asks for (ConfigError: it failed); otherwise the
    prompt's text, the response and the end-of-sequence token."""
    if templated:
        conversations = [conversation(each.prompt, each.text) for each in responses]
        texts = render_with(tokenizer, conversations, key, add_generation_prompt=False)
        return tokens_of(tokenizer, texts, special=False, key=key)
    return text_tokens(tokenizer, [each.prompt.text + each.text for each in responses])


def text_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts, each followed by the end-of-sequence token unless it ends with it."""
    end = eos_id(tokenizer)
    tokens = tokens_of(tokenizer, texts)
    return [[*ids, end] if ids and ids[-1] != end else ids for ids in tokens]


def load_classifier_format(options: ClassifierOptions) -> ClassifierFormat:
    """Read the tokenizer; ConfigError if it is missing, or lacks the chat template that the options
    need."""
    key = "reward.kwargs.tokenizer_path"
    try:
        tokenizer = load_tokenizer(resolve_model(options.tokenizer_path))
    except ConfigError as error:
        raise ConfigError([replace(issue, key=key) for issue in error.issues]) from error
    if options.apply_chat_template and not tokenizer.chat_template:
        fix = f"set {_KEY}=false, or {key} to a tokenizer with one"
        raise ConfigError([ConfigIssue(_KEY, True, "the tokenizer has no chat template", fix)])
    return ClassifierFormat(tokenizer, options)


def _only(values: Any) -> Any:
    if isinstance(values, list) and len(values) == 1:
        return values[0]
    count = len(values) if isinstance(values, list) else "no"
    return FailedScore(
        f"the server's model has {count} outputs; serve a *ForSequenceClassification with one label"
    )
