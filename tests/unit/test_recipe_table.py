"""Every recipe's header says what it is, and docs/recipes.md has all of them."""

from __future__ import annotations

import pytest
from recipe_list import CPU_RECIPES, GPU_RECIPES, LABELS, header_of, simulated_recipes
from recipe_table import PAGE, page


@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_the_header_of_a_recipe_for_gpus_has_every_line(path):
    header = header_of(path)
    assert header.title
    assert tuple(header.labels) == LABELS
    assert all(text.endswith(".") for text in header.labels.values()), header.labels


@pytest.mark.parametrize("path", CPU_RECIPES, ids=lambda path: path.stem)
def test_the_header_of_a_recipe_for_cpus_says_how_it_was_run(path):
    header = header_of(path)
    assert header.title
    assert tuple(header.labels) == ("Run",)


def test_the_page_has_the_tables_of_today():
    assert PAGE.read_text() == page(), "run: make recipes"


def test_variants_are_simulated_once():
    stands = simulated_recipes()
    assert {stands[stand] for stand in stands.values()} == set(stands.values())
    base = "deepseek_llm_7b_gsm8k"
    assert stands[f"{base}_modelscope"] == stands[f"{base}_pfppo"] == stands[base] == base
    assert stands[f"{base}_cp2"] == f"{base}_cp2"
    assert len(stands) > len(set(stands.values())) > 10
