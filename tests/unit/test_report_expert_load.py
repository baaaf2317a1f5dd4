"""The plot of the experts' load: every role and layer; none for models without experts."""

from mppo.report.history import History
from mppo.report.pictures import load_rows, plot_expert_load


def _history() -> History:
    runs = History(None)
    for step in (1, 2, 3):
        runs.append(step, {
            "actor/moe/layer_2/max_vio": 0.5 * step, "actor/moe/layer_10/max_vio": 0.0,
            "critic/moe/layer_2/max_vio": 1.0, "actor/moe/max_vio": 9.0,
        })  # fmt: skip
    return runs


def test_rows_are_by_role_and_layer_relative_to_an_even_load() -> None:
    rows = load_rows(_history())
    assert rows["actor"] == ([1, 2, 3], {10: [1.0, 1.0, 1.0], 2: [1.5, 2.0, 2.5]})
    assert rows["critic"] == ([1, 2, 3], {2: [2.0, 2.0, 2.0]})


def test_a_picture_is_written_only_where_there_are_experts(tmp_path) -> None:
    plot_expert_load(_history(), tmp_path / "load.png", "run")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    plot_expert_load(History(None), tmp_path / "none.png", "run")
    assert not (tmp_path / "none.png").exists()
