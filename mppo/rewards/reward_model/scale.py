"""Scale of the reward model's scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mppo.config.sections.reward_model import RewardModelNormalization
from mppo.safety.input_error import InputError


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
