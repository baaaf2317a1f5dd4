"""The table of migrated commands in ``docs/migrating.md``."""

from migration.table import BEGIN, END, PAGE, ROOT, commands, count
from mppo_migrate.__main__ import migrate


def test_the_page_has_every_command_and_todays_counts(monkeypatch):
    monkeypatch.chdir(ROOT / "docs")  # without ./configs no layout is chosen
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    written = {cells[0].strip("`"): cells[1:] for cells in lines}
    run = "run: PYTHONPATH=tests:extras/migrate:extras/migrate/tests python -m migration.table"
    found = {name: rest for name, *rest in commands()}
    assert written.keys() == found.keys(), run
    for name in ("trl-minimal", "openrlhf-dotted", "verl-shell"):  # all of them take a while
        system, arguments, text = found[name]
        _, _, without, unknown, _ = count(name, migrate(system, text, arguments)[0])
        assert written[name][1:3] == [str(without), str(unknown)], run
