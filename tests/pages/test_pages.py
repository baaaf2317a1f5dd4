"""Every command and snippet of the documentation runs, and prints what the page shows.

A page's blocks run in their order in one folder (``world``), its commands in a real shell, in which
the programs are links to ``page_client``. ``programs`` says how each program runs, ``exceptions``
which blocks do not run, with the reason.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pages.blocks import HEADERS, PAGES, ROOT, blocks_of
from pages.exceptions import NOT_RUN, PROOFS, SMALL
from pages.page_run import PageRun
from pages.world import add_run, make_template, variables

SERVER = ROOT / "tests/pages/page_server.py"
BLOCKS = {page: blocks_of(page) for page in [*PAGES, *HEADERS]}
WITH_BLOCKS = [page for page, blocks in BLOCKS.items() if blocks]


@pytest.fixture(scope="module")
def servers():
    """The variables that lead commands to the fork servers."""
    folder = Path(tempfile.mkdtemp(prefix="pages-"))  # names of sockets must be short
    kinds = {"PAGE_SERVER": "cpu", "PAGE_SIMULATING": "simulating"}
    processes = [
        subprocess.Popen([sys.executable, SERVER, folder / kind, kind], stdin=subprocess.PIPE)
        for kind in kinds.values()
    ]
    try:
        yield {name: str(folder / kind) for name, kind in kinds.items()}
    finally:
        for process in processes:
            process.stdin.close()
            process.wait(30)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def template(servers, tmp_path_factory):
    """The folder that is copied for each page, with the run that pages look at."""
    folder = make_template(tmp_path_factory.mktemp("template"))
    add_run(folder, variables(folder) | servers)
    return folder


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_runs(page, servers, template, tmp_path):
    folder = tmp_path / "page"
    shutil.copytree(template, folder, symlinks=True)
    name = str(page.relative_to(ROOT))
    small = {"PAGE_SMALL": SMALL[name]} if name in SMALL else {}
    run = PageRun(folder, variables(folder) | servers | small)
    found = [f"{b.place}: {problem}" for b in BLOCKS[page] for problem in run.problems(b)]
    found += run.proof(PROOFS[name]) if name in PROOFS else []
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("pattern", NOT_RUN)
def test_every_exception_is_needed(pattern):
    texts = [block.text for blocks in BLOCKS.values() for block in blocks]
    assert any(re.search(pattern, text, re.MULTILINE) for text in texts)
