"""Files of data sets on the Hugging Face Hub, from its cache or downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from mppo.hub.download import explain, one_at_a_time
from mppo.recipe.data_set_name import DataSetName
from mppo.recipe.errors import ConfigError, config_error
from mppo.safety.input_files import read_text

CARD, MAX_CARD_BYTES = "README.md", 4 << 20
CONVERTED = "refs/convert/parquet"
"""The branch on which the Hub keeps parquet copies of data sets in other forms."""
ENDINGS = (".parquet", ".jsonl", ".json")
"""Forms in which a data set is read, in the order of preference."""


def fetch_data_set(wanted: DataSetName) -> tuple[Path, ...]:
    """Return the files of one split in the Hub's cache; download them if they are not there.

    The data set's card says which files belong to a split; without a card, their names do
    (``train-*``, ``data/train-*``, ``train/*``). A data set in another form, such as csv, is taken
    from the Hub's parquet copy. If several processes of a node call this, one downloads and the
    others wait for it.

    Raises:
        ConfigError: the Hub cannot be reached and the files are not in the cache, or there is no
            such data set, configuration or split.
    """
    from huggingface_hub import constants

    lock = Path(constants.HF_HUB_CACHE) / f"mppo--data--{wanted.name.replace('/', '--')}.lock"
    try:
        with one_at_a_time(lock):
            card = _card(_download(wanted.name, [CARD], None))
            files = _download_split(wanted, None, _patterns(wanted, card))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        fix = (
            "check the name; if this host cannot reach the Hub, download the data set elsewhere "
            "and name its files; a gated data set needs HF_TOKEN"
        )
        raise _error(wanted, explain(error, "cannot be downloaded from the Hub"), fix) from error
    if files:
        return files
    why = f"has no {' or '.join(ENDINGS)} files of the split {wanted.split!r}"
    try:
        folder = f"{wanted.config or 'default'}/{wanted.split}"
        with one_at_a_time(lock):
            files = _download_split(wanted, CONVERTED, [f"{folder}/*.parquet"])
    except (OSError, ValueError) as error:
        why += f", and its parquet copy {explain(error, 'cannot be downloaded')}"
    if not files:
        raise _error(wanted, why, "write hf:OWNER/NAME/CONFIG:SPLIT with a split that it has")
    return files


def _download(name: str, patterns: Sequence[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    return Path(snapshot_download(name, allow_patterns=list(patterns), **options))


def _download_split(
    wanted: DataSetName, revision: str | None, patterns: Sequence[str]
) -> tuple[Path, ...]:
    readable = [p if p.endswith(ENDINGS) else p + end for p in patterns for end in ENDINGS]
    folder = _download(wanted.name, readable, revision)
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    for ending in ENDINGS:
        found = [
            folder / name
            for name in names
            if name.endswith(ending) and any(fnmatch(name, pattern) for pattern in readable)
        ]
        if found:
            return tuple(found)
    return ()


def _patterns(wanted: DataSetName, card: dict[str, Any]) -> list[str]:
    """Patterns of the names of a split's files; ConfigError if none of several configurations is
    named or is the default."""
    configs = {entry["config_name"]: entry for entry in _configs(card)}
    chosen = wanted.config
    if chosen is None and configs:
        defaults = [name for name, entry in configs.items() if entry.get("default")]
        chosen = next((n for n in (*defaults, "default") if n in configs), None)
        if chosen is None and len(configs) == 1:
            (chosen,) = configs
        if chosen is None:
            fix = f"name one: hf:{wanted.name}/{next(iter(configs))}:{wanted.split}"
            raise _error(wanted, f"has the configurations {', '.join(configs)}", fix)
    if chosen in configs and (patterns := list(_listed(configs[chosen], wanted.split))):
        return patterns
    folders = [f"{wanted.config}/"] if wanted.config else ["", "data/"]
    ends = ("", "-*", "/*")
    return [f"{folder}{wanted.split}{end}" for folder in folders for end in ends]


def _listed(config: dict[str, Any], split: str) -> Iterator[str]:
    """Patterns that a card gives for a split; without splits, the files are the training split."""
    data_files = config.get("data_files")
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        entry = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = entry.get("path")
        if entry.get("split") == split:
            yield from (p for p in (paths if isinstance(paths, list) else [paths]) if p)


def _configs(card: dict[str, Any]) -> list[dict[str, Any]]:
    found = card.get("configs")
    entries = found if isinstance(found, list) else []
    return [e for e in entries if isinstance(e, dict) and isinstance(e.get("config_name"), str)]


def _card(folder: Path) -> dict[str, Any]:
    try:
        text = read_text(folder / CARD, MAX_CARD_BYTES)
        _, header, _ = f"\n{text}".split("\n---\n", 2)
        found = yaml.safe_load(header)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _error(wanted: DataSetName, why: str, fix: str) -> ConfigError:
    return config_error("data.train_files", wanted.name, why, fix)
