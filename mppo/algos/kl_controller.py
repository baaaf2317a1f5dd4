"""The coefficient of the KL penalty in the reward, fixed or following a target."""

from __future__ import annotations


def adapted_coefficient(
    coef: float, current_kl: float, target_kl: float, num_sequences: int, horizon: int
) -> float:
    """``coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)``.

    KL and target in nats; ``n`` and the horizon (time constant of the adaptation) in sequences.

    Source: https://arxiv.org/abs/1909.08593; verl ``AdaptiveKLController``.
    """
    error = min(max(current_kl / target_kl - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * num_sequences / horizon)


class KLController:
    """Keeps the coefficient between steps, ``fixed`` or ``adaptive``
    (:func:`adapted_coefficient`)."""

    def __init__(self, kind: str, kl_coef: float, target_kl: float, horizon: int) -> None:
        self.kind = kind
        self.coef = kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, num_sequences: int) -> None:
        if self.kind == "adaptive":
            self.coef = adapted_coefficient(
                self.coef, current_kl, self.target_kl, num_sequences, self.horizon
            )

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved coefficient; target and horizon remain the recipe's."""
        self.coef = float(state["coef"])
