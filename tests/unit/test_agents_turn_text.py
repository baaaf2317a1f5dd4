"""What an agent says is tokenised as it follows the policy's tokens."""

from __future__ import annotations

import pytest
import tokenizers
import transformers

from mppo.agents.endpoint.prompts import TurnText
from mppo.data.chat_template import ChatRenderer
from mppo.hub.builtin import byte_tokenizer


def _tokenizer_with_a_space_before_a_text(kind: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of characters and some pairs, with the space of Llama 2, T5 or GPT-2's option."""
    space = "\u0120" if kind == "byte level" else "\u2581"
    merges = [(space, "h"), ("h", "i"), (space, "x"), ("x", "h"), ("b", "h")]
    pieces = [space, *"abhix.\n\u010a", *map("".join, merges)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    if kind == "prepended":
        backend.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend(space), tokenizers.normalizers.Replace(" ", space)]
        )
        backend.decoder = tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.Replace(space, " "),
                tokenizers.decoders.Fuse(),
                tokenizers.decoders.Strip(" ", 1, 0),
            ]
        )
    elif kind == "metaspace":
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    else:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("kind", ["prepended", "metaspace", "byte level", "none"])
def test_an_agents_text_gains_no_space(kind: str) -> None:
    plain = kind == "none"
    tokenizer = byte_tokenizer() if plain else _tokenizer_with_a_space_before_a_text(kind)
    before = tokenizer("ab", add_special_tokens=False)["input_ids"]
    texts = ["hi", " hi", "", "\nhi", "xhi", "hi hi"]
    assert plain or "ab hi" in tokenizer.decode(
        before + tokenizer("hi", add_special_tokens=False)["input_ids"]
    )
    turn_text = TurnText(tokenizer, ChatRenderer(tokenizer, "rollout.agent"))
    found = [turn_text.token_ids(text, 0) for text in texts]
    behind = [tokenizer.decode(before + ids).lstrip(" ") for ids in found]
    assert behind == [f"ab{text}" for text in texts]
