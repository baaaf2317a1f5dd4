"""What a rank imports."""

from __future__ import annotations

from ranks import start_ranks


def test_no_rank_imports_what_only_a_plot_or_a_tracker_needs():
    start_ranks(_find_no_plots_and_trackers, (), world=1)


def _find_no_plots_and_trackers(rank: int) -> None:
    import rank_imports  # by the server, in which this process was forked

    assert "mppo.trainer.loop" in rank_imports.AT_THE_START
    assert not {"matplotlib", "wandb", "mlflow", "swanlab"} & rank_imports.AT_THE_START
