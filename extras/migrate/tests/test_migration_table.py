"""The table of migrated commands in ``docs/migrating.md``."""

from migration.table import BEGIN, END, PAGE, ROOT, rows


def test_the_page_says_of_every_command_how_much_is_not_recognised(monkeypatch):
    monkeypatch.chdir(ROOT / "docs")  # without ./configs no layout is chosen, which takes seconds
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    written = {cells[0].strip("`"): cells[3] for cells in lines}
    run = "run: PYTHONPATH=tests:extras/migrate:extras/migrate/tests python -m migration.table"
    assert written == {counts[0]: str(counts[3]) for counts, _ in rows(planned=False)}, run
