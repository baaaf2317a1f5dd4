"""The order in which prompts are trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from mppo.batch import Prompt
from mppo.data.source import PromptSet


class PromptLoader:
    """Iterator over batches of prompts without end, epoch after epoch.

    Every epoch holds each prompt once, in an order that depends on seed and epoch alone. No prompt
    is dropped: a batch at the end of an epoch is filled up from the next epoch. The state consists
    of the position and of the prompts that were returned with ``give_back``.

    Args:
        prompt_set: N prompts, at least one.
        batch_size: prompts per batch.
        shuffle: use a new order in each epoch; otherwise the order of ``prompt_set``.
        seed: seed of the orders.
    """

    def __init__(self, prompt_set: PromptSet, batch_size: int, shuffle: bool, seed: int) -> None:
        if not len(prompt_set) or batch_size < 1:
            raise ValueError(
                f"need at least one prompt and a positive batch size: "
                f"got {len(prompt_set)} prompts, batch_size {batch_size}"
            )
        self.prompt_set = prompt_set
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.position = 0
        self._returned: list[int] = []
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch, rounded up: the last one may reach into the next epoch."""
        return -(-len(self.prompt_set) // self.batch_size)

    @property
    def epoch(self) -> float:
        """Epochs done so far, as a fraction."""
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
        """Return the position in the data as values for JSON."""
        return {
            "position": self.position,
            "returned": list(self._returned),
            "seed": self.seed,
            "num_prompts": len(self.prompt_set),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            ValueError: the state was saved with other data or another seed, with which the
                position would refer to other prompts.
        """
        mine = self.state_dict()
        for key in ("seed", "num_prompts"):
            if state[key] != mine[key]:
                raise ValueError(
                    f"the checkpoint's data order has {key} = {state[key]}, this run has "
                    f"{mine[key]}: resume with the same data section, or start a new run"
                )
        self.position = int(state["position"])
        self._returned = [int(position) for position in state.get("returned", ())]

    def _prompt(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self.prompt_set))
        if self.shuffle:
            index = self._epoch_order(epoch)[index]
        return dataclasses.replace(self.prompt_set.prompts[index], uid=position)

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self.prompt_set)))
            Random(f"{self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
