"""Compare a family that a page adds with transformers: ``python family_check.py NAME``."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
from hf_families import assert_same_tensors, save, tensors
from weights_worker import Case, sequences, worker

from mppo.models.transformers_model import load_model

LAYOUTS = {"alone": {}, "TP2": {"tp": 2}, "PP2": {"pp": 2}}


def main(name: str) -> None:
    """Logits within 2e-6 of transformers' and the same bytes back, in each layout."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save(name, folder / name)
        context = multiprocessing.get_context("fork")
        cases = [Case(name, layout) for layout in LAYOUTS.values()]
        ranks = [context.Process(target=worker, args=(rank, 2, cases, folder)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert not any(rank.exitcode for rank in ranks)
        model, theirs = load_model(folder / name), tensors(folder / name)
        with torch.no_grad():
            expected = torch.cat(
                [model(s[None]).logits[0] for s in sequences(model.config.vocab_size)]
            )
        for layout, outcome in zip(LAYOUTS, torch.load(folder / "results.pt", weights_only=False)):
            difference = (outcome["logits"] - expected).abs().max() / expected.abs().max()
            assert difference < 2e-6, layout
            assert_same_tensors(outcome["streamed"], theirs)


if __name__ == "__main__":
    main(sys.argv[1])
