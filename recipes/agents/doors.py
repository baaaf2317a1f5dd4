"""A game for recipes/tiny_cpu_game.yaml that no single turn can win: a prize behind a door.

Whatever the first turn says, the environment answers with the letter of the right door. The second
turn opens a door by its number, and wins if it is the letter's: A is 1, B is 2 and so on.
"""

import gymnasium

LETTERS = "ABCD"


class Doors(gymnasium.Env):
    """Two turns; the reward is 1 for the right door, which only the second turn can know."""

    observation_space = action_space = gymnasium.spaces.Text(100, min_length=0)

    def reset(self, *, seed=None, options=None):
        """Choose the door."""
        super().reset(seed=seed)
        self._right, self._letter_seen = int(self.np_random.integers(len(LETTERS))), False
        return "", {}

    def step(self, action):
        """Show the letter, then open a door."""
        if not self._letter_seen:
            self._letter_seen = True
            return LETTERS[self._right], 0.0, False, False, {}
        return "", float(action == str(self._right + 1)), True, False, {}


gymnasium.register("Doors-v0", Doors)
