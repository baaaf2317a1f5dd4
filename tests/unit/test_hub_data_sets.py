"""Data sets of the Hub: a real client, the Hub's cache on disk, and a server in the Hub's form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mppo.recipe.data_set_name import DataSetName, parse_data_set
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.trainer.start.loading import load_checked

ROOT = Path(__file__).parents[2]
COMMIT = "1" * 40
ROW = json.dumps({"prompt": "1+2=", "answer": "3"}) + "\n"
CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - split: test
    path: [main/test-*]
- config_name: socratic
  data_files: socratic/all.jsonl
---
# Data
"""
FETCH = """
import sys
from mppo.recipe.data_set_name import parse_data_set
from mppo.recipe.errors import ConfigError
from mppo.hub.data_sets import fetch_data_set
for name in sys.argv[1:]:
    try:
        files = fetch_data_set(parse_data_set(name, "train"))
        print(*[str(file).partition("snapshots/")[2][41:] for file in files])
    except ConfigError as error:
        print(error.issues[0].why, "|", error.issues[0].fix)
"""


def fetch(home: Path, *names: str, **environment: str) -> list[str]:
    """Fetch data sets in a process with its own cache; a line for each."""
    variables = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    result = subprocess.run(
        [sys.executable, "-c", FETCH, *names],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ, **variables},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def write_cache(home: Path, name: str, files: dict[str, str]) -> None:
    """Write a data set as the Hub's client stores it."""
    folder = home / "hub" / f"datasets--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for file, text in files.items():
        path = folder / "snapshots" / COMMIT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_splits_are_found_in_the_cache_without_a_network(tmp_path):
    parts = ["main/train-0.parquet", "main/train-1.parquet", "main/test-0.parquet"]
    with_card = {"README.md": CARD, "socratic/all.jsonl": ROW, **dict.fromkeys(parts, "x")}
    write_cache(tmp_path, "openai/gsm8k", with_card)
    both_forms = {"train.jsonl": ROW, "train.parquet": "x", "data/test-0.json": "[]", "sub/x": ""}
    write_cache(tmp_path, "owner/plain", both_forms)
    names = [
        "hf:openai/gsm8k/main", "hf:openai/gsm8k/main:test", "hf:openai/gsm8k/socratic:train",
        "hf:openai/gsm8k:train", "hf:openai/gsm8k/main:dev",
        "hf:owner/plain", "hf:owner/plain:test", "hf:owner/none",
    ]  # fmt: skip
    found = fetch(tmp_path, *names, HF_HUB_OFFLINE="1")
    assert found[:3] == [" ".join(parts[:2]), parts[2], "socratic/all.jsonl"]
    assert found[3] == (
        "has the configurations main, socratic | name one: hf:openai/gsm8k/main:train"
    )
    assert "files of the split 'dev'" in found[4]
    assert found[5:7] == ["train.parquet", "data/test-0.json"]
    assert found[7].startswith("cannot be downloaded from the Hub: ")
    assert "download the data set elsewhere and name its files" in found[7]


SERVED = {
    ("owner/lines", "main", "1" * 40): {"README.md": "no header", "data/train-0.jsonl": ROW},
    ("owner/tables", "main", "2" * 40): {"table.csv": "a,b\n"},
    ("owner/tables", "refs/convert/parquet", "3" * 40): {"default/train/0000.parquet": "x"},
}
"""Files by data set, branch and commit; of the second data set only the copy can be read."""


class HubInSmall(BaseHTTPRequestHandler):
    """Serves ``SERVED`` in the form of the Hub."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].replace("%2F", "/")
        body, commit = None, ""
        for (name, branch, head), files in SERVED.items():
            answers = {f"/datasets/{name}/resolve/{head}/{file}": files[file] for file in files}
            names = [{"rfilename": file} for file in files]
            found = {"id": name, "sha": head, "siblings": names}
            tree = [
                {"type": "file", "path": file, "size": len(text), "oid": "0"}
                for file, text in files.items()
            ]
            answers[f"/api/datasets/{name}/revision/{branch}"] = json.dumps(found)
            answers[f"/api/datasets/{name}/tree/{head}"] = json.dumps(tree)
            if path in answers:
                body, commit = answers[path].encode(), head
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{abs(hash(path)):x}"')
        if body is None:
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    def log_message(self, *args: object) -> None:
        """Write no log."""


def test_a_data_set_is_downloaded_once_and_then_read_from_the_cache(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubInSmall)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    names = ["hf:owner/lines", "hf:owner/tables", "hf:owner/lines:test"]
    try:
        found = fetch(tmp_path, *names, HF_ENDPOINT=url, HF_HUB_OFFLINE="0")
    finally:
        server.shutdown()
        server.server_close()
    assert found[:2] == ["data/train-0.jsonl", "default/train/0000.parquet"]
    assert found[2].startswith("has no .parquet or .jsonl or .json files of the split 'test'")
    again = fetch(tmp_path, names[0], HF_ENDPOINT=url, HF_HUB_OFFLINE="0")
    assert again == found[:1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf:a/b", DataSetName("a/b", None, "train")),
        ("hf:a/b:test", DataSetName("a/b", None, "test")),
        ("hf:a.x/b-2/c_3:test", DataSetName("a.x/b-2", "c_3", "test")),
    ],
)
def test_names_have_owner_configuration_and_split(name, expected):
    assert parse_data_set(name, "train") == expected


@pytest.mark.parametrize("name", ["hf:", "hf:a", "hf:a/../b", "hf:a/b/c/d", "hf:a/b:", "hf:/a/b"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="is not of the form hf:OWNER/NAME"):
        parse_data_set(name, "train")


def load(settings: list[str], missing: str = "", files: bool = True):
    asked = []

    def fetch(wanted: DataSetName) -> tuple[Path, ...]:
        asked.append(wanted)
        if wanted.name == missing:
            raise ConfigError([ConfigIssue("data.train_files", wanted.name, "is missing", "look")])
        return (ROOT / "pyproject.toml", path)

    path = ROOT / "docs" / "recipe.schema.json"
    settings = [*settings, "data.max_prompt_length=32", "data.max_response_length=16"]
    return load_checked(None, settings, 1, files=files, fetch_data_set=fetch), asked


def test_every_list_of_files_may_name_data_sets(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    sources = "[{train_files: [hf:c/d], val_files: [hf:c/d/e:dev], weight: 2}, {task: reverse}]"
    recipe, asked = load([f"data.sources={sources}"], files=False)
    assert asked == []
    assert recipe.data.sources[0].train_files == ("hf:c/d",)
    with pytest.raises(ConfigError) as caught:
        load([f"data.sources={sources}"])
    # the files that the data sets were replaced by were checked in their place
    assert {(issue.key, issue.value) for issue in caught.value.issues} == {
        ("data.sources.0.train_files", str(ROOT / "pyproject.toml")),
        ("data.sources.0.val_files", str(ROOT / "pyproject.toml")),
    }


def test_an_unavailable_data_set_is_an_issue_of_its_key():
    with pytest.raises(ConfigError) as caught:
        load(["data.train_files=[hf:a/b]", "data.val_files=[hf:c/d]"], missing="a/b")
    (issue,) = [issue for issue in caught.value.issues if issue.why == "is missing"]
    assert (issue.key, issue.value) == ("data.train_files", "hf:a/b")
