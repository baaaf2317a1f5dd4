"""Attacks on secrets."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from attacks.attack import Attack, Table, nothing

PLAIN = "open5esame7cave"
"""A secret without a known format: only its name identifies it."""
HUB = "hf_qWeRtYuIoPaSdFgHjK0123"
MODEL = "sk-proj-4f3d2c1b0a9e8d7c6b5a"
FORGE = "ghp_0123456789abcdefghijABCDEFGHIJ"
CLOUD = "AKIA0123456789ABCDEF"
WEB = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGliYWJhIn0.c2lnbmF0dXJlLW9mLXRlc3Q"
PEM = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"
ALL = (PLAIN, HUB, MODEL, FORGE, CLOUD, WEB, PEM)
LENGTHS = ("data.max_prompt_length=64", "data.max_response_length=64")
TINY = ("model.path=builtin:tiny", "data.task=arithmetic", *LENGTHS)


def _captured(program: Callable[[], int | None]) -> tuple[int, str]:
    """Exit code and all output of a program, including that of libraries."""
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as stream:
        try:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            code = program() or 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
        stream.seek(0)
        return code, stream.read().decode(errors="replace")


def kept_secret(
    says: str, program: Callable[[Path], int | None], environment: Mapping[str, str]
) -> Callable[[Path], int]:
    """A run that prints its output and ``no secret found``, unless a secret is in that or in a new
    file, or the output lacks what makes it the right one."""

    def run(folder: Path) -> int:
        os.environ.update(environment)
        before = set(folder.rglob("*"))
        code, text = _captured(lambda: program(folder))
        written = [path for path in folder.rglob("*") if path.is_file() and path not in before]
        texts = [text, *(path.read_bytes().decode(errors="replace") for path in written)]
        shown = [secret for secret in ALL if any(secret in each for each in texts)]
        print("a secret shows" if shown else text)
        print("no secret found" if says in text and not shown else "unexpected output")
        return code

    return run


def _main(module: str, *arguments: str) -> Callable[[Path], int | None]:
    return lambda folder: import_module(module).main(arguments)


def _recipe(text: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / "recipe.yaml").write_text(text)

    return prepare


def _row(
    given: str,
    says: str,
    *arguments: str,
    module: str = "mppo.train",
    code: int = 2,
    recipe: str | None = None,
    environment: Mapping[str, str] = {},
) -> Attack:
    """``says`` is in the output besides; a secret that is not printed at all is no test."""
    if recipe is not None:
        arguments = ("--config", "recipe.yaml", *arguments)
    prepare = nothing if recipe is None else _recipe(recipe)
    run = kept_secret(says, _main(module, *arguments), environment)
    return Attack(given, run, "no secret found", code=code, within_s=60.0, prepare=prepare)


def _reports(folder: Path) -> int:
    """The recipe in a run's files."""
    from mppo.recipe.load import load_recipe
    from mppo.report.reporter import Reporter

    kwargs = f"reward.kwargs={{auth: [{PLAIN}], note: '{HUB} {CLOUD}', '{MODEL}': 1}}"
    recipe = load_recipe(None, [*TINY, kwargs, f"trainer.project_name={FORGE}"])
    reporter = Reporter(folder / "run", recipe.trainer, recipe.model_dump(mode="json"), 1, True)
    reporter.start(0)
    reporter.log(1, {"critic/score/mean": 1.0})
    reporter.close()
    print("reported")
    return 0


def _find_fonts(folder: Path) -> None:
    """Matplotlib lists the fonts of the machine at its first use, in the home folder."""
    import_module("matplotlib.font_manager")


def _server_file(folder: Path) -> int:
    """The file with an SGLang server's key, and the command line, which every user can read."""
    from mppo.rollout.sglang.server_options import launch_command

    command = launch_command({"host": "127.0.0.1", "port": 1, "api_key": PLAIN})
    file = Path(command[-1])
    print(command, oct(file.stat().st_mode & 0o777), oct(file.parent.stat().st_mode & 0o777))
    file.unlink()
    return 0


def _search_long_texts(folder: Path) -> int:
    """Texts of a megabyte for which a search that begins again at each part would take hours."""
    from mppo.safety.redact import redact_text

    for begin, piece, end in (("://:", "]", "a"), ("", "-eyJ", ""), ("?", ".x-amz-a", "%20=1")):
        redact_text(begin + piece * (1_000_000 // len(piece)) + end)
    print("searched")
    return 0


_DRY = ("--dry-run", "--show-recipe", *TINY)

TABLE = Table(
    "Secrets",
    "A secret is recognised by its key, by its format, by its place in a URL, or as the value of "
    "an environment variable; no program prints it or writes it to a file. The input of each row "
    "contains such a secret, and the test searches the output and all new files for it.",
    (
        _row(
            "`api_key` among the options of the server",
            "is set by mppo",
            *_DRY,
            "rollout.name=sglang",
            f"rollout.server_args.api_key={PLAIN}",
        ),
        _row(
            "`auth` with lists and mappings below it",
            "resolved recipe",
            *_DRY,
            recipe=f"reward:\n  kwargs:\n    auth:\n      users: [{{name: [{PLAIN}]}}]\n",
            code=0,
        ),
        _row(
            "a password beside a number in a list",
            "resolved recipe",
            *_DRY,
            f"reward.kwargs={{passwords: [1, {PLAIN}]}}",
            code=0,
        ),
        _row(
            "a password with `@` in a URL",
            "holds a user or a password",
            *_DRY,
            "reward.name=remote",
            f"reward.url=http://me:p@{PLAIN}@host/score",
        ),
        _row(
            "a password with `/` in a URL",
            "reward.url",
            *_DRY,
            "reward.name=remote",
            f"reward.url=http://me:p/{PLAIN}@host/score",
        ),
        _row(
            "`?key=` and `&sig=` in a URL of another scheme",
            "is not the URL of an HTTP server",
            *_DRY,
            "reward.name=remote",
            f"reward.url=ftp://host/?key={PLAIN}&sig={PLAIN}",
        ),
        _row(
            "a signed URL in a list of files",
            "resolved recipe",
            "--dry-run",
            "--show-recipe",
            "model.path=builtin:tiny",
            *LENGTHS,
            f"data.train_files=[a.jsonl, 'https://host/b.jsonl?X-Amz-Signature={PLAIN}']",
            code=0,
        ),
        _row(
            "a hub's token under a key that does not exist",
            "no such key",
            *_DRY,
            f"model.hub_key={HUB}",
        ),
        _row(
            "a token where a number belongs",
            "trainer.seed",
            *_DRY,
            f"trainer.seed={MODEL}",
        ),
        _row(
            "a token as a key",
            "resolved recipe",
            *_DRY,
            f"reward.kwargs={{'{FORGE}': 1}}",
            code=0,
        ),
        _row(
            "a token inside a sentence",
            "resolved recipe",
            *_DRY,
            f"data.system_prompt='use {WEB}, then {CLOUD}.'",
            code=0,
        ),
        _row(
            "a private key over several lines",
            "resolved recipe",
            *_DRY,
            recipe="data:\n  system_prompt: |\n    -----BEGIN PRIVATE KEY-----\n"
            f"    {PEM}\n    -----END PRIVATE KEY-----\n",
            code=0,
        ),
        _row(
            "a recipe that is not YAML, at the line of a key",
            "is not valid YAML",
            "--dry-run",
            recipe=f'rollout:\n  server_args:\n    api_key: "{PLAIN}": x\n',
        ),
        _row(
            "an option that does not exist",
            "unrecognized arguments",
            *_DRY,
            f"--api-key={PLAIN}",
        ),
        _row(
            "an override without `=`",
            "is not a setting",
            *_DRY,
            f"password:{PLAIN}",
        ),
        _row(
            "the value of `GITLAB_PAT` in a path",
            "model.path",
            "--dry-run",
            "data.task=arithmetic",
            f"model.path=/models/{PLAIN}/x",
            environment={"GITLAB_PAT": PLAIN},
        ),
        _row(
            "the value of `AWS_ACCESS_KEY_ID`, quoted for a URL, in a name",
            "resolved recipe",
            *_DRY,
            f"trainer.experiment_name=run-{PLAIN}%2Fx",
            code=0,
            environment={"AWS_ACCESS_KEY_ID": f"{PLAIN}/x"},
        ),
        _row(
            "the value of `HF_TOKEN` in a folder for `mppo-replay`",
            "has no",
            f"/runs/{PLAIN}",
            module="mppo.replay",
            environment={"HF_TOKEN": PLAIN},
        ),
        _row(
            "the value of `HF_TOKEN` in a folder for `mppo-report`",
            "is not a run folder",
            f"/runs/{PLAIN}",
            module="mppo.report.html.program",
            environment={"HF_TOKEN": PLAIN},
        ),
        _row(
            "a token in a folder for `mppo-inspect`",
            "holds no dumped step",
            f"/runs/{HUB}",
            module="mppo.dumps.inspection",
        ),
        _row(
            "a token in a folder for `mppo-convert`",
            "error:",
            "inspect",
            f"/models/{HUB}",
            module="checkpoints_convert.__main__",
        ),
        _row(
            "a key in a recipe that `mppo.serve` refuses",
            "no such key",
            "--host=127.0.0.1",
            "--port=1",
            f"rollout.secret={PLAIN}",
            module="mppo.serve",
            recipe="seed: 1\n",
            environment={"MPPO_ROLLOUT_API_KEY": PLAIN},
        ),
        Attack(
            "a recipe full of tokens, reported by a run",
            kept_secret("reported", _reports, {}),
            "no secret found",
            code=0,
            within_s=60.0,
            prepare=_find_fonts,
            writes=("run/*",),
        ),
        Attack(
            "rows of a megabyte that make a search for secrets begin again and again",
            _search_long_texts,
            "searched",
            code=0,
            within_s=60.0,
        ),
        Attack(
            "the process table with an SGLang server's command line",
            kept_secret("0o600 0o700", _server_file, {}),
            "no secret found",
            code=0,
            by_user=True,
        ),
    ),
)
