"""Files of the user's code, imported."""

from __future__ import annotations

import sys

from mppo.safety.python_file import import_file


def test_a_file_imports_the_modules_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/beside_the_reward.py").write_text("POINTS = 3\n")
    (tmp_path / "code/mine.py").write_text("from beside_the_reward import POINTS\n")
    assert import_file("code/mine.py", "mine_of_a_test").POINTS == 3
    before = list(sys.path)
    import_file("code/mine.py", "mine_of_a_test")
    assert sys.path == before, "a folder is added once"
