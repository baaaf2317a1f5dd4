"""An episode as a tree of tokens, and its leaves as sequences to train on.

A node is a turn of the policy, with the tokens of others that were given after the turn before it.
A history that a client rewrites, shortens or continues twice is a branch. Token ids and
log-probabilities stay as the engine sampled them.

    context P0, turn A0, given E0, turn A1         leaves: P0 | A0 E0 A1
                   \\__ given F0, turn B1                   P0 A0 F0 | B1
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mppo.agents.conversation import Message
from mppo.batch.episode import NO_WEIGHTS, Part
from mppo.batch.prompt import ComparedByValue


@dataclass(frozen=True, eq=False)
class Leaf(ComparedByValue):
    """A sequence to train on.

    Args:
        context_ids: int32 ``[C]``, everything before its first own token of the policy.
        ids: int32 ``[L]``, tokens of the policy, and others' tokens between them.
        logprobs: float32 ``[L]``, 0 for others' tokens.
        parts: (version of the weights, number of tokens) in order; ``NO_WEIGHTS`` for others'.
        experts: int16 ``[C + L - 1, layers, k]``, by which the engine computed the tokens; None: it
            does not report them.
    """

    context_ids: Tensor
    ids: Tensor
    logprobs: Tensor
    parts: tuple[Part, ...]
    finish_reason: str
    experts: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SampledTurn:
    """A turn's tokens, at least one, in the form of ``Leaf``. Several requests to the engine may
    have generated them. ``experts``: of all tokens before its last one; in a tree those from the
    last token of the turn before."""

    ids: Tensor
    logprobs: Tensor
    parts: tuple[Part, ...]
    finish_reason: str
    experts: Tensor | None = None


@dataclass(eq=False)
class TurnNode:
    """A turn of the policy in a session's tree.

    Args:
        given: int32 ``[G]``, what others wrote after the parent's turn; without a parent, the
            whole context.
        asked: the messages of ``given``.
        answer: the message of the turn.
        key: of the messages up to the turn's end; a client that sends them goes on there.
        children: number of turns that follow it.
        length: number of tokens from the first one of the context to the turn's last one.
    """

    parent: TurnNode | None
    given: Tensor
    turn: SampledTurn
    asked: tuple[Message, ...]
    answer: Message
    key: Hashable
    children: int = 0
    length: int = field(init=False)

    def __post_init__(self) -> None:
        before = 0 if self.parent is None else self.parent.length
        self.length = before + len(self.given) + len(self.turn.ids)

    def path(self) -> list[TurnNode]:
        """The turns from the first one to this one."""
        found: list[TurnNode] = []
        node: TurnNode | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def token_ids(self) -> list[int]:
        """All tokens up to the end of the turn."""
        pieces = [ids for node in self.path() for ids in (node.given, node.turn.ids)]
        return torch.cat(pieces).tolist()

    def messages(self) -> list[Message]:
        """All messages up to the turn, which is the last one."""
        return [each for node in self.path() for each in (*node.asked, node.answer)]


class TokenTree:
    """The turns of one episode."""

    def __init__(self) -> None:
        self._nodes: dict[TurnNode, None] = {}
        self._by_key: dict[Hashable, list[TurnNode]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def deepest(self, keys: Sequence[Hashable]) -> tuple[TurnNode | None, int]:
        """The latest turn that ends the longest known beginning of a conversation, and its number
        of messages; or None and 0. ``keys``: of the first message, the first two, and so on."""
        for count in range(len(keys), 0, -1):
            found = self._by_key.get(keys[count - 1])
            if found:
                return found[-1], count
        return None, 0

    def deepest_of_tokens(self, token_ids: Sequence[int]) -> TurnNode | None:
        """The turn that ends the longest known beginning of some tokens; the latest of equals."""
        best: TurnNode | None = None
        for node in self._nodes:
            longer = best is None or node.length >= best.length
            if longer and node.length <= len(token_ids):
                known = node.token_ids()
                best = node if list(token_ids[: len(known)]) == known else best
        return best

    def add(
        self,
        parent: TurnNode | None,
        given: Sequence[int],
        turn: SampledTurn,
        asked: Sequence[Message],
        answer: Message,
        key: Hashable,
    ) -> TurnNode:
        assert len(turn.ids), "a turn has at least one token"
        ids = torch.tensor(given, dtype=torch.int32)
        if parent is not None:
            parent.children += 1
            if turn.experts is not None:  # what was known before is by what the engine sampled
                turn = replace(turn, experts=turn.experts[parent.length - 1 :].clone())
        node = TurnNode(parent, ids, turn, tuple(asked), answer, key)
        self._nodes[node] = None
        self._by_key.setdefault(key, []).append(node)
        return node

    def discard(self, node: TurnNode) -> None:
        """Forget a turn that no client has seen; one with turns after it stays."""
        if node.children or node not in self._nodes:
            return
        del self._nodes[node]
        self._by_key[node.key].remove(node)
        if node.parent is not None:
            node.parent.children -= 1

    def leaves(self) -> list[Leaf]:
        """The sequences to train on, in order of creation; the last one is the episode's answer.

        A token of the policy that several leaves share is the policy's in the first of them, and
        context in the others: each token is trained on once.
        """
        owned: set[TurnNode] = set()
        found: list[Leaf] = []
        for node in self.last_turns():
            path = node.path()
            own = [turn for turn in path if turn not in owned]
            found.append(_leaf(path[: len(path) - len(own)], own))
            owned.update(own)
        return found

    def last_turns(self) -> list[TurnNode]:
        """The turns that no other follows, in order of creation."""
        return [node for node in self._nodes if not node.children]


def _leaf(shared: Sequence[TurnNode], own: Sequence[TurnNode]) -> Leaf:
    """The sequence of turns, of which the ``shared`` ones belong to an earlier leaf."""
    context = [ids for node in shared for ids in (node.given, node.turn.ids)]
    ids, logprobs, parts = [], [], []
    for node in own:
        if node is own[0]:
            context.append(node.given)
        elif len(node.given):
            ids.append(node.given)
            logprobs.append(torch.zeros(len(node.given)))
            parts.append((NO_WEIGHTS, len(node.given)))
        ids.append(node.turn.ids)
        logprobs.append(node.turn.logprobs)
        parts += node.turn.parts
    experts = [node.turn.experts for node in (*shared, *own) if node.turn.experts is not None]
    return Leaf(
        context_ids=torch.cat(context),
        ids=torch.cat(ids),
        logprobs=torch.cat(logprobs),
        parts=merged_parts(parts),
        finish_reason=own[-1].turn.finish_reason,
        experts=torch.cat(experts) if experts else None,
    )


def merged_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts, neighbours of one version as one, empty ones left out."""
    found: list[Part] = []
    for version, count in parts:
        if found and found[-1][0] == version:
            found[-1] = (version, found[-1][1] + count)
        elif count:
            found.append((version, count))
    return tuple(found)
