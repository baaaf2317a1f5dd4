"""File modes of a run's files."""

from __future__ import annotations

import os

import pytest

from mppo.safety.temporary import private_files


def modes_inside(folder) -> tuple[int, int]:
    """Modes of a folder and a file that a run makes in its own folder."""
    before = os.umask(0o022)
    try:
        with private_files(folder):
            inside = folder / "checkpoints"
            inside.mkdir(parents=True)
            (inside / "recipe.yaml").write_text("seed: 1")
    finally:
        assert os.umask(before) == 0o022
    return inside.stat().st_mode & 0o777, (inside / "recipe.yaml").stat().st_mode & 0o777


def test_a_new_run_folder_is_the_users_alone(tmp_path):
    assert modes_inside(tmp_path / "runs/ppo") == (0o700, 0o600)
    assert (tmp_path / "runs/ppo").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("mode", "folders", "files"),
    [
        (0o755, 0o700, 0o600),
        (0o775, 0o700, 0o600),
        (0o2700, 0o700, 0o600),
        (0o2750, 0o750, 0o640),
        (0o2770, 0o770, 0o660),
        (0o2777, 0o770, 0o660),
    ],
)
def test_a_folder_with_the_set_group_id_bit_is_shared_with_its_group(
    tmp_path, mode, folders, files
):
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(mode)
    assert modes_inside(run) == (folders, files)
    assert run.stat().st_mode & 0o7777 == mode
