"""A plot of reward and KL over the run."""

from __future__ import annotations

from pathlib import Path

from mppo.report import history
from mppo.report.history import History
from mppo.safety.disk import replacing


def plot_run(runs: History, path: Path, title: str) -> None:
    """Write a PNG with training and validation reward above, and the KL to the reference below."""
    # only the rank that draws imports matplotlib: it takes half a second
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    reward_axis, kl_axis = figure.subplots(2, 1, sharex=True)
    steps, rewards = runs.series(history.REWARD)
    reward_axis.plot(steps, rewards, color="tab:blue", linewidth=1, label="training")
    val_steps, val_rewards = runs.series(history.VAL_REWARD)
    if val_steps:
        reward_axis.plot(val_steps, val_rewards, "o-", color="tab:orange", label="validation")
    if steps or val_steps:
        reward_axis.legend()
    reward_axis.set_ylabel("mean reward")
    kl_axis.plot(*runs.series(history.KL), color="tab:green", linewidth=1)
    kl_axis.set_ylabel("KL to the reference\n(nats per response)")
    kl_axis.set_xlabel("step")
    for axis in (reward_axis, kl_axis):
        axis.grid(alpha=0.3)
    with replacing(path) as building:
        figure.savefig(building, dpi=120, metadata={"Software": None})
