"""Trees of turns worked out by hand, and the keys by which histories are compared."""

from __future__ import annotations

import torch

from mppo.agents.endpoint.messages import history_keys, read_messages
from mppo.agents.endpoint.tree import SampledTurn, TokenTree, TurnNode, merged_parts
from mppo.batch.episode import NO_WEIGHTS


def add(
    tree: TokenTree, parent: TurnNode | None, given: list[int], ids: list[int], version: int = 0
) -> TurnNode:
    """A turn whose log-probabilities are its ids, negative."""
    turn = SampledTurn(
        torch.tensor(ids, dtype=torch.int32),
        -torch.tensor(ids, dtype=torch.float32),
        ((version, len(ids)),),
        "stop",
    )
    asked = [{"role": "user", "content": str(given)}]
    return tree.add(
        parent, given, turn, asked, {"role": "assistant", "content": str(ids)}, len(tree)
    )


def shown(tree: TokenTree) -> list[tuple[list[int], list[int], tuple[tuple[int, int], ...]]]:
    return [(leaf.context_ids.tolist(), leaf.ids.tolist(), leaf.parts) for leaf in tree.leaves()]


def test_a_chain_is_one_leaf():
    tree = TokenTree()
    first = add(tree, None, [1, 2], [3, 4])
    last = add(tree, first, [5], [6], version=1)
    assert shown(tree) == [([1, 2], [3, 4, 5, 6], ((0, 2), (NO_WEIGHTS, 1), (1, 1)))]
    assert tree.leaves()[0].logprobs.tolist() == [-3, -4, 0, -6]
    assert last.token_ids() == [1, 2, 3, 4, 5, 6]
    assert [each["content"] for each in last.messages()] == ["[1, 2]", "[3, 4]", "[5]", "[6]"]


def test_a_shared_turn_is_trained_on_in_the_first_leaf_only():
    tree = TokenTree()
    root = add(tree, None, [1], [2])
    left = add(tree, root, [3], [4])
    add(tree, root, [5], [6, 7])
    add(tree, left, [8], [9])
    add(tree, left, [], [10])
    add(tree, None, [11], [12])
    other = (NO_WEIGHTS, 1)
    assert shown(tree) == [
        ([1], [2, 5, 6, 7], ((0, 1), other, (0, 2))),
        ([1, 2, 3], [4, 8, 9], ((0, 1), other, (0, 1))),
        ([1, 2, 3, 4], [10], ((0, 1),)),
        ([11], [12], ((0, 1),)),
    ]


def test_a_turn_that_is_forgotten_makes_its_parent_a_leaf_again():
    tree = TokenTree()
    root = add(tree, None, [1], [2])
    child = add(tree, root, [3], [4])
    tree.discard(root)  # it has a turn after it
    assert len(tree) == 2
    tree.discard(child)
    tree.discard(child)
    assert shown(tree) == [([1], [2], ((0, 1),))]
    assert tree.deepest([0, 1]) == (root, 1)


def test_the_deepest_known_history_is_the_latest_of_equals():
    tree = TokenTree()
    assert tree.deepest(["a"]) == (None, 0)
    first, again = add(tree, None, [1], [2]), add(tree, None, [1], [2])
    assert tree.deepest([0, "b"]) == (first, 1)
    assert tree.deepest([0, 1, "b"]) == (again, 2)
    assert tree.deepest_of_tokens([1, 2, 9]) is again
    assert tree.deepest_of_tokens([1, 3]) is None


def test_neighbouring_parts_of_one_version_are_one():
    parts = [(0, 2), (0, 1), (NO_WEIGHTS, 0), (0, 1), (NO_WEIGHTS, 3), (1, 2)]
    assert merged_parts(parts) == ((0, 4), (NO_WEIGHTS, 3), (1, 2))


def call(arguments, name="add", **more):
    return {
        "id": "1",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
        **more,
    }


SAID = {"role": "assistant", "content": "so", "tool_calls": [call('{"a": 1, "b": [2]}')]}
SAME = [
    SAID | {"content": " so\n"},
    SAID | {"content": [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}]},
    SAID | {"refusal": None, "audio": None, "function_call": None, "name": "me"},
    SAID | {"tool_calls": [call('{"b":[2],"a":1}', id="2")]},
    SAID | {"tool_calls": [call({"a": 1, "b": [2]}, index=0)]},
]
OTHER = [
    SAID | {"content": "no"},
    SAID | {"role": "user"},
    SAID | {"tool_calls": None},
    SAID | {"tool_calls": [call('{"a": 2, "b": [2]}')]},
    SAID | {"tool_calls": [call('{"a": 1, "b": [2]}', name="sub")]},
    SAID | {"tool_calls": SAID["tool_calls"] * 2},
]


def test_what_clients_change_in_passing_makes_no_other_history():
    def key(message, tools=()):
        user = {"role": "user", "content": "a"}
        return history_keys(tools, read_messages([user, message]))[-1]

    assert {key(message) for message in SAME} == {key(SAID)}
    others = [key(SAID), *(key(message) for message in OTHER), key(SAID, [{"tools": 1}])]
    assert len(set(others)) == len(others)
    user, system = {"role": "user", "content": "a "}, {"role": "developer", "content": "a"}
    assert key(user) != key({"role": "user", "content": "a"})
    assert key(system) == key({"role": "system", "content": "a"})
