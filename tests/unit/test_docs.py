"""README and docs: links lead somewhere, snippets run or are valid recipes, commands have the
options they use, and the site builds."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import jsonschema
import pytest
import yaml

from mppo.config.errors import ConfigError
from mppo.config.load import json_schema, load_recipe
from mppo.config.reference import recipe_reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
EXAMPLES = ["adding_a_reward.md", "adding_an_agent.md", "adding_an_estimator.md"]
"""Pages whose Python snippets build on each other and run as written."""
PROGRAMS = {
    "mppo-convert": "checkpoints_convert.__main__",
    "mppo-evaluate": "mppo.evaluate",
    "mppo-inspect": "mppo.dumps.inspection",
    "mppo-migrate": "mppo.migrate",
    "mppo-report": "mppo.report.html.program",
    "mppo-serve-reward": "mppo.serve_reward",
    "mppo-simulate": "mppo.simulate",
}
FOREIGN = "examples/scripts/"
"""Where other projects keep the scripts whose commands are migrated."""
LAUNCHERS = ("torchrun", "mpirun")
COMMAND = re.compile(
    r"^(?:\$ )?((?:\.venv/bin/)?(?:torchrun|mpirun|python|make|sbatch|mppo-\w+)\s.*)$"
)
MARKER = re.compile(r"^(?P<indent> *)```(?P<kind>[\w-]*)$")


def code_blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of every fenced or indented block of a page."""
    blocks, fence, lines, indented = [], None, [], []
    for line in [*page.read_text().splitlines(), ""]:
        marker = MARKER.match(line)
        if fence is not None:
            if marker:
                blocks.append((fence["kind"], "\n".join(lines)))
                fence, lines = None, []
            else:
                lines.append(line.removeprefix(fence["indent"]))
        elif marker:
            fence = marker
        elif line.startswith("    ") and not line.lstrip().startswith(("- ", "| ")):
            indented.append(line[4:])
        elif indented:
            blocks.append(("", "\n".join(indented)))
            indented = []
    return blocks


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands() -> list:
    """Every command of the pages on one line, without comments, redirections and optional parts;
    and whether the page shows the issues of its recipe."""
    found = {}
    for page in PAGES:
        for _, text in code_blocks(page):
            for line in text.replace("\\\n", " ").splitlines():
                match = COMMAND.match(line.strip())
                if match and FOREIGN not in line:
                    command = re.split(r"\s+(?:#|[<>|]\s)", match[1])[0]
                    command = re.sub(r"\s+(?:\.\.\.|\[[-A-Z][^\]]*\])", "", command)
                    command = " ".join(command.split()).replace("$kind", "fused")
                    found.setdefault(command, (page.stem, "2 issues" in text))
    return [
        pytest.param(command, refused, id=f"{page}: {command}"[:90])
        for command, (page, refused) in found.items()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def snippets(kind: str) -> list:
    return [
        pytest.param(text, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (language, text) in enumerate(code_blocks(page))
        if language == kind
    ]


@pytest.mark.parametrize("text", snippets("yaml"))
def test_yaml_snippets_are_parts_of_recipes(text):
    jsonschema.Draft202012Validator(json_schema()).validate(yaml.safe_load(text))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_python_of_a_worked_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    space: dict = {}
    for language, text in code_blocks(ROOT / "docs" / name):
        if language != "python":
            continue
        file = re.match(r"# (\w+\.py)\n", text)
        if file:
            (tmp_path / file[1]).write_text(text)
        table_row = text.startswith('"')
        exec(f"table = {{{text}}}" if table_row else text, space)
    tests = [value for key, value in space.items() if key.startswith("test_")]
    for test in tests:
        test()
    assert tests or space["table"]["median_of_others"](
        space["scores_B"], space["group_B"], None, None
    ).equal(space["expected"])


@pytest.mark.parametrize(("command", "refused"), commands())
def test_commands_have_the_options_and_keys_they_use(command, refused, capsys):
    words = shlex.split(command.removeprefix(".venv/bin/"))
    if words[0] in LAUNCHERS:
        while not (words[0] in ("-m", "python") or words[0].endswith(".py")):
            words.pop(0)
        words = words if words[0] == "python" else ["python", *words]
    if words[0] == "make":
        assert re.search(
            rf"^{words[1]}:|^schema.*{words[1]}", (ROOT / "Makefile").read_text(), re.M
        )
        return
    if words[0] == "sbatch":
        script = next(word for word in words if word.endswith(".sbatch"))
        assert (ROOT / script).exists()
        return
    module, arguments = program(words)
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(module).main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        assert option in text, option
    recipes = [word for word in arguments if word.startswith("recipes/") and word.endswith("yaml")]
    if recipes and (ROOT / recipes[0]).exists():
        keys = [word for word in arguments if re.match(r"[\w.]+=", word)]
        with pytest.raises(ConfigError) if refused else nullcontext():
            load_recipe(ROOT / recipes[0], keys)


def program(words: list[str]) -> tuple[str, list[str]]:
    """Module and arguments of a command without its launcher."""
    if words[0] in PROGRAMS:
        return PROGRAMS[words[0]], words[1:]
    assert words[0] == "python"
    if words[1] == "-m":
        is_room = (ROOT / words[2].replace(".", "/")).is_dir()
        return f"{words[2]}.__main__" if is_room else words[2], words[3:]
    return words[1].removesuffix(".py").replace("/", "."), words[2:]


def test_the_reference_of_recipe_keys_equals_the_code():
    assert (ROOT / "docs/recipe_reference.md").read_text() == recipe_reference(), "run: make schema"


def test_the_site_builds_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ROOT / "docs", tmp_path]
    run = subprocess.run(build, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "schedule.html").read_text()
    loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", page)
    assert not loaded, "a page loads nothing from the network"
