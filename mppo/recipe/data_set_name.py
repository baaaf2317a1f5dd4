"""Names of data sets on the Hugging Face Hub, as ``data.train_files`` holds them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mppo.safety.input_error import InputError

PREFIX = "hf:"
FORM = "hf:OWNER/NAME, hf:OWNER/NAME:SPLIT or hf:OWNER/NAME/CONFIG:SPLIT"
_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(rf"{PREFIX}({_PART}/{_PART})(?:/({_PART}))?(?::({_PART}))?")


@dataclass(frozen=True)
class DataSetName:
    """A part, such as the split ``train``, of a data set ``OWNER/NAME``; config None is the default
    one."""

    name: str
    config: str | None
    split: str


def is_data_set(name: str) -> bool:
    """Whether an entry of a list of data files names a data set instead of a file."""
    return name.startswith(PREFIX)


def is_data_set_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def parse_data_set(name: str, default_split: str) -> DataSetName:
    """Parse the name of a data set; InputError if it has another form."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise InputError(f"is not of the form {FORM}")
    return DataSetName(match[1], match[2], match[3] or default_split)
