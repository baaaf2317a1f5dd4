"""The order in which prompts are trained on, and checks of a run's prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from mppo.batch.prompt import Prompt
from mppo.data.content import check_same_rows
from mppo.data.rows import too_few_prompts
from mppo.data.source import PromptSet, SourceShare
from mppo.recipe.errors import ConfigError, config_error
from mppo.recipe.model_shape import model_shape
from mppo.recipe.schema import Recipe
from mppo.safety.input_error import InputError


def check_batch_size(prompt_set: PromptSet, batch_size: int) -> None:
    """Check that a batch holds no prompt twice; ConfigError if there are too few prompts."""
    if batch_size > len(prompt_set):
        raise ConfigError([too_few_prompts(batch_size, len(prompt_set), prompt_set.summary())])


def check_token_ids(
    recipe: Recipe, prompts: Sequence[Prompt], hf_configs: Mapping[str, Any]
) -> None:
    """Check that the models have an embedding of every token; a GPU would only abort.

    A reward model for which texts are tokenised again needs no config.

    Raises:
        ConfigError: the tokenizer is another model's.
    """
    largest = max((int(each.token_ids.max()) for each in prompts if len(each.token_ids)), default=0)
    for role in recipe.roles():
        if role.name == "reward_model" or role.name not in hf_configs:
            continue
        vocabulary = model_shape(hf_configs[role.name]).vocab
        if largest >= vocabulary:
            given, own = recipe.model.tokenizer_path, role.path_key == "model.path"
            key, value = ("model.tokenizer_path", given) if given else (role.path_key, role.path)
            why = f"a prompt has the token id {largest}, the model of {role.name} {vocabulary} ids"
            fix = "leave it out: the model has its own" if given and own else "give a model with it"
            raise config_error(key, value, why, fix)


class PromptLoader:
    """Iterator over batches of prompts without end, epoch after epoch.

    Every epoch holds each prompt once, in an order that depends on seed and epoch alone. If the
    sources are mixed by weight, an epoch has as many prompts in total, but of each source a number
    in proportion to its weight: every source continues where the epoch before ended, and starts
    again when its prompts are used up. No prompt is dropped: a batch at the end of an epoch is
    filled up from the next epoch. The state consists of the position and of the prompts that were
    returned with ``give_back``.

        any_content: resume from a state that was saved with other rows.
    """

    def __init__(
        self,
        prompt_set: PromptSet,
        batch_size: int,
        shuffle: bool,
        seed: int,
        any_content: bool = False,
    ) -> None:
        if not len(prompt_set) or batch_size < 1:
            raise InputError(
                f"need at least one prompt and a positive batch size: "
                f"got {len(prompt_set)} prompts, batch_size {batch_size}"
            )
        self.prompt_set, self.batch_size = prompt_set, batch_size
        self.shuffle, self.seed, self.any_content = shuffle, seed, any_content
        self.position = 0
        self._returned: list[int] = []
        self._order: tuple[int, list[int]] = (-1, [])
        self._draws = draws_per_epoch(prompt_set.shares)

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch, rounded up: the last one may reach into the next epoch."""
        return -(-len(self.prompt_set) // self.batch_size)

    @property
    def epoch(self) -> float:
        return self.position / len(self.prompt_set)

    def __iter__(self) -> Iterator[list[Prompt]]:
        return self

    def __next__(self) -> list[Prompt]:
        """Return the next batch; each prompt's ``uid`` is its position in the run."""
        return self.take(self.batch_size)

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts; those that were given back come first."""
        prompts = self.peek(count)
        again = len(self._returned[:count])
        self._returned = self._returned[again:]
        self.position += count - again
        return prompts

    def peek(self, count: int) -> list[Prompt]:
        """Return what ``take`` would return, without a change of the state."""
        again = self._returned[:count]
        fresh = range(self.position, self.position + count - len(again))
        return [self._prompt(position) for position in (*again, *fresh)]

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Return prompts that were not trained on; they come first in the next ``take``."""
        self._returned = [prompt.uid for prompt in prompts] + self._returned

    def state_dict(self) -> dict[str, Any]:
        state = {
            "position": self.position,
            "returned": list(self._returned),
            "seed": self.seed,
            "num_prompts": len(self.prompt_set),
            "contents": [content.digest for content in self.prompt_set.contents],
        }
        sizes = [share.count for share in self.prompt_set.shares]
        return state | ({"prompts_and_draws": [sizes, self._draws]} if sizes else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            InputError: the state was saved with other data or another seed, with which the
                position would refer to other prompts. ConfigError: the rows differ.
        """
        mine = self.state_dict()
        for key in ("seed", "num_prompts", "prompts_and_draws"):
            # the last key is absent without a mix, as in checkpoints of older versions
            if state.get(key) != mine.get(key):
                raise InputError(
                    f"the checkpoint's data order has {key} = {state.get(key)}, this run has "
                    f"{mine.get(key)}: resume with the same data section, or start a new run"
                )
        saved = state.get("contents")  # absent in checkpoints of older versions
        if saved is not None and not self.any_content:
            check_same_rows(self.prompt_set.contents, saved)
        self.position = int(state["position"])
        self._returned = [int(position) for position in state.get("returned", ())]

    def _prompt(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self.prompt_set))
        index = self._epoch_order(epoch)[index]
        return dataclasses.replace(self.prompt_set.prompts[index], uid=position)

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = self._mixed(epoch) if self._draws else list(range(len(self.prompt_set)))
            if self.shuffle:
                Random(f"{self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def _mixed(self, epoch: int) -> list[int]:
        """Return the prompts of an epoch of mixed sources, each source spread evenly over it."""
        placed: list[tuple[float, int]] = []
        offset = 0
        for source, (share, draws) in enumerate(zip(self.prompt_set.shares, self._draws)):
            drawn = self._draw(source, share.count, epoch * draws, (epoch + 1) * draws)
            placed += [((i + 0.5) / draws, offset + index) for i, index in enumerate(drawn)]
            offset += share.count
        # sorting by place alone keeps the order of the sources at equal places
        placed.sort(key=lambda entry: entry[0])
        return [index for _, index in placed]

    def _draw(self, source: int, count: int, first: int, end: int) -> Iterator[int]:
        """Yield the prompts of draws ``first`` to ``end`` from a source of ``count`` prompts; each
        pass over it has an order of its own."""
        while first < end:
            number, start = divmod(first, count)
            order = list(range(count))
            if self.shuffle:
                Random(f"{self.seed} source {source} pass {number}").shuffle(order)
            drawn = order[start : start + end - first]
            yield from drawn
            first += len(drawn)


def draws_per_epoch(shares: Sequence[SourceShare]) -> list[int]:
    """Divide an epoch, which has as many prompts as all sources together, by relative weight: the
    number of prompts of each source per epoch, at least one, in total the number of prompts."""
    total = sum(share.count for share in shares)
    weights = sum(share.weight for share in shares)
    exact = [total * share.weight / weights for share in shares]
    draws = [max(1, int(number)) for number in exact]
    while (missing := total - sum(draws)) != 0:
        # the source whose number differs most from its exact share gets or gives up a prompt
        step = 1 if missing > 0 else -1
        open_to = [i for i, number in enumerate(draws) if number + step >= 1]
        draws[max(open_to, key=lambda i: step * (exact[i] - draws[i]))] += step
    return draws
