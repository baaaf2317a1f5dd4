"""The blocks of one page, run in their order."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import jsonschema
import yaml
from pages.blocks import Block, settings_of, steps_of
from pages.exceptions import BASES, NAMES, NOT_RUN, TOLERANCES
from pages.output import Output
from pages.world import shell

from mppo.recipe.load import json_schema

_FILE = re.compile(r"# ([\w/]+\.\w+)\n")
"""First line of a block that is a file: later blocks of the page find it."""
PLUGIN = "@mppo.register."
"""In a file: recipes of the page execute it."""
SITE = "toctree"
"""Blocks that Sphinx checks when the site is built (``test_docs.py``)."""


class PageRun:
    """A page in its folder.

    Args:
        folder: copy of the template.
        environment: variables of its shell.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._settings: list[str] = []
        self._python: list[str] = []
        self._output: Output | None = None
        """Of the page's last command whose output it shows."""

    def problems(self, block: Block) -> list[str]:
        """What is wrong with a block; empty if it runs, or cannot run for a stated reason."""
        if reason_of(block) or block.language == SITE:
            return []
        if file := _FILE.match(block.text):
            (self._folder / file[1]).write_text(block.text + "\n")
        if file and PLUGIN in block.text:
            return []
        if block.language == "yaml":
            return self._yaml(block)
        if block.language == "python":
            return self._run_python(block)
        if block.is_shell:
            return self._run(block)
        if self._output is not None:
            return self._absent(block.text)
        return ["is neither a command nor output of one: name its language, or add its reason to "
                "NOT_RUN in tests/pages/exceptions.py"]  # fmt: skip

    def _run(self, block: Block) -> list[str]:
        found = []
        for step in steps_of(block):
            if not step.script:
                found += self._absent(step.shown)
                continue
            script = "\n".join([*self._settings, step.script])
            code, output = shell(self._folder, script, self._environment)
            expected = 3 if "does NOT fit" in step.shown else 2 if " issues" in step.shown else 0
            if code != expected:
                found.append(f"{step.script}\nends with {code}, not {expected}:\n{output[-3000:]}")
            elif step.shown:
                self._output = Output(output, _tolerance(block))
                found += self._absent(step.shown)
            self._settings += settings_of(step.script)
        return found

    def _absent(self, shown: str) -> list[str]:
        assert self._output is not None
        rest = str(self._output)
        absent = self._output.missing(shown)
        return [f"not in the output:\n{line}" for line in absent] and [
            "\n".join(["not in the output:", *absent, "the output:", rest])
        ]

    def _yaml(self, block: Block) -> list[str]:
        """The recipe passes every check of a dry run, over a base if it is a part of a recipe; the
        snippet is valid in an editor."""
        content = yaml.safe_load(block.text)
        recipe = self._folder / "snippet.yaml"
        missing = {} if "path" in content.get("model", {}) else {"base": "base.yaml"}
        base = yaml.safe_load(BASES.get(block.page, BASE))
        if {"train_files", "sources"} & set(content.get("data", {})):
            del base["data"]["task"]
        (self._folder / "base.yaml").write_text(yaml.safe_dump(base))
        recipe.write_text(yaml.safe_dump(missing | content))
        command = "python mppo/train.py --config snippet.yaml --dry-run"
        code, output = shell(self._folder, command, self._environment)
        if code:
            return [f"as a recipe:\n{output[-3000:]}"]
        return [f"by the JSON schema: {e.message}" for e in _schema().iter_errors(content)]

    def proof(self, command: str) -> list[str]:
        """What a command says against the page's example, after all blocks."""
        code, output = shell(
            self._folder, command, self._environment | {"PAGE_SMALL": "rollout.name=local"}
        )
        return [] if code == 0 else [f"{command}\nends with {code}:\n{output[-3000:]}"]

    def _run_python(self, block: Block) -> list[str]:
        """The page's Python up to this block, and the tests among it."""
        self._python.append(block.text)
        program = [NAMES.get(block.page, ""), *self._python, RUN_TESTS]
        (self._folder / "snippets.py").write_text("\n\n".join(program))
        code, output = shell(self._folder, 'python -c "$(cat snippets.py)"', self._environment)
        return [] if code == 0 else [f"Python ends with {code}:\n{output[-3000:]}"]


RUN_TESTS = "for name, test in list(globals().items()):\n    name.startswith('test_') and test()"
BASE = """
model: {path: $HOME/models/Qwen2-7B-Instruct}
data: {task: arithmetic, max_prompt_length: 128, max_response_length: 128, train_batch_size: 64}
actor:
  ppo_mini_batch_size: 64
  ppo_micro_batch_size_per_gpu: 8
  megatron: {tensor_model_parallel_size: 4}
critic: {ppo_micro_batch_size_per_gpu: 8, megatron: {tensor_model_parallel_size: 4}}
rollout: {name: sglang}
trainer: {n_gpus_per_node: 8}
"""
"""The keys that a snippet of a recipe takes for granted."""


@cache
def _schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema())


def reason_of(block: Block) -> str | None:
    """Why a block does not run, if it does not."""
    return next((why for what, why in NOT_RUN.items() if re.search(what, block.text, re.M)), None)


def _tolerance(block: Block) -> float | None:
    found = (far for what, far in TOLERANCES.items() if re.search(what, block.text, re.M))
    return next(found, 0.0)
