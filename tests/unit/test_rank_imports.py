"""What a rank imports."""

from __future__ import annotations

import sys

from ranks import start_ranks


def test_no_rank_imports_what_only_a_plot_needs():
    start_ranks(_find_no_plots, (), world=1)


def _find_no_plots(rank: int) -> None:
    assert "matplotlib" not in sys.modules
