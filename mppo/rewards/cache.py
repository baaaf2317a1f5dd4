"""Memory of scores by content: the same response to the same prompt is scored once."""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from mppo.batch.score import ResponseScore
from mppo.rewards.response import Response

ENTRIES = 1 << 16
"""Most scores that are remembered; the one not used for longest is forgotten first."""


class ScoreCache:
    """The scores of this rank's last responses by their content. Threads may share it.

    The content is everything that a reward function can see: data source, prompt, ground truth,
    other columns, and the response's text and tokens. A response without a score is not remembered.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._known: OrderedDict[bytes, ResponseScore] = OrderedDict()
        self._lock = threading.Lock()

    def score(
        self,
        score: Callable[[Sequence[Response]], list[ResponseScore]],
        responses: Sequence[Response],
    ) -> list[ResponseScore]:
        """Score responses; only those of unknown content reach ``score``, one of each content."""
        keys = [content_key(response) for response in responses]
        with self._lock:
            found = {key: self._known[key] for key in keys if key in self._known}
        missing = {key: each for key, each in zip(keys, responses) if key not in found}
        if missing:
            found.update(zip(missing, score(list(missing.values())), strict=True))
        with self._lock:
            for key, each in found.items():
                if each.error is None and each.unscored is None:
                    self._known[key] = each
                    self._known.move_to_end(key)
            while len(self._known) > self._entries:
                self._known.popitem(last=False)
        return [found[key] for key in keys]


def content_key(response: Response) -> bytes:
    """A digest of a response, its prompt and its data row."""
    prompt = response.prompt
    texts = (prompt.data_source, prompt.verifier, prompt.ground_truth, prompt.text, response.text)
    row = json.dumps([texts, prompt.messages, prompt.extra], default=_plain, sort_keys=True)
    digest = hashlib.sha256(row.encode(errors="surrogatepass"))
    digest.update(array("q", response.token_ids).tobytes())
    return digest.digest()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)
