"""A plugin's family against transformers, and a model and recipe of it for a run:
``python family_check.py PLUGIN``."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
import transformers as hf
from hf_families import CONFIGS, TIED, assert_same_tensors, save, tensors
from pages.world import RECIPE
from weights_worker import Case, sequences, worker

from mppo.hub.builtin import write_small_model
from mppo.models.transformers_model import load_model
from mppo.recipe.sections.registered import load_plugin_files

NAME = "ernie4_5"
LAYOUTS = {"alone": {}, "TP2": {"tp": 2}, "PP2": {"pp": 2}}


def compare() -> None:
    """Logits within 2e-6 of transformers' and the same bytes back, in each layout."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save(NAME, folder / NAME)
        context = multiprocessing.get_context("fork")
        cases = [Case(NAME, layout) for layout in LAYOUTS.values()]
        ranks = [context.Process(target=worker, args=(rank, 2, cases, folder)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert not any(rank.exitcode for rank in ranks)
        model, theirs = load_model(folder / NAME), tensors(folder / NAME)
        with torch.no_grad():
            expected = torch.cat(
                [model(s[None]).logits[0] for s in sequences(model.config.vocab_size)]
            )
        for layout, outcome in zip(LAYOUTS, torch.load(folder / "results.pt", weights_only=False)):
            difference = (outcome["logits"] - expected).abs().max() / expected.abs().max()
            assert difference < 2e-6, layout
            assert_same_tensors(outcome["streamed"], theirs)


def main(plugin: str) -> None:
    """Compare, and write ``small`` and ``small.yaml`` for a step of PPO."""
    load_plugin_files([plugin])
    CONFIGS[NAME] = lambda: hf.Ernie4_5Config(**TIED, head_dim=32)
    compare()
    plain = CONFIGS[NAME]().to_dict() | {"vocab_size": 512}
    plain["architectures"] = ["Ernie4_5ForCausalLM"]
    Path("small").mkdir()
    write_small_model(plain, Path("small"))
    text = RECIPE.replace("builtin:tiny", "small").replace("total_training_steps: 3", "seed: 1")
    Path("small.yaml").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
