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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cluster.slurm_cluster import SlurmCluster, missing
from pages.blocks import HEADERS, PAGES, ROOT, Block, blocks_of
from pages.exceptions import NOT_RUN, PROOFS, SMALL
from pages.page_run import PageRun
from pages.world import add_run, make_template, variables

pytestmark = pytest.mark.timeout(2400)
SERVER = ROOT / "tests/pages/page_server.py"
BLOCKS = {page: blocks_of(page) for page in [*PAGES, *HEADERS]}
WITH_BLOCKS = [page for page, blocks in BLOCKS.items() if blocks]


@contextmanager
def fork_server(kind: str) -> Iterator[str]:
    """The socket of a server that runs commands, with the imports of ``kind``."""
    with TemporaryDirectory(prefix="pages-") as folder:  # names of sockets must be short
        path = f"{folder}/socket"
        process = subprocess.Popen([sys.executable, SERVER, path, kind], stdin=subprocess.PIPE)
        try:
            yield path
        finally:
            process.communicate(timeout=300)


@pytest.fixture(scope="module")
def server():
    """The variable that leads commands to a server with mppo's modules."""
    with fork_server("cpu") as path:
        yield {"PAGE_SERVER": path}


@pytest.fixture(scope="module")
def simulating():
    """The same for simulated GPUs."""
    with fork_server("simulating") as path:
        yield {"PAGE_SIMULATING": path}


@pytest.fixture(scope="module")
def slurm():
    """A controller of GPU nodes for ``sbatch --test-only``; without one, ``programs.sbatch`` checks
    only scripts and their arguments."""
    if missing() is not None:
        yield {}
        return
    with TemporaryDirectory(prefix="slurm-") as folder:
        cluster = SlurmCluster(Path(folder), count=0)
        try:
            cluster.start()
            yield {"SLURM_CONF": cluster.environ["SLURM_CONF"]}
        finally:
            cluster.stop()


NEEDED = {"simulate": "simulating", "sbatch": "slurm", "scancel": "slurm"}
"""By a word of a page, the fixture that its commands need."""


@pytest.fixture(scope="module")
def template(server, tmp_path_factory):
    """The folder that is copied for each page, with the run that pages look at."""
    folder = make_template(tmp_path_factory.mktemp("template"))
    add_run(folder, variables(folder) | server)
    return folder


@pytest.fixture
def run_of(request, server, template, tmp_path):
    """Make the run of a page's blocks in a folder of its own."""

    def make(name: str, text: str) -> PageRun:
        folder = tmp_path / "page"
        shutil.copytree(template, folder, symlinks=True)
        environment = variables(folder) | server
        for word, fixture in NEEDED.items():
            if word in text:
                environment |= request.getfixturevalue(fixture)
        if name in SMALL:
            environment["PAGE_SMALL"] = SMALL[name]
        return PageRun(folder, environment)

    return make


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_runs(page, run_of):
    name, blocks = str(page.relative_to(ROOT)), BLOCKS[page]
    run = run_of(name, "\n".join(block.text for block in blocks))
    found = [f"{block.place}: {problem}" for block in blocks for problem in run.problems(block)]
    found += run.proof(PROOFS[name]) if name in PROOFS else []
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize(
    ("language", "text", "why"),
    [
        (
            "",
            "python mppo/train.py --config recipes/demo.yaml actor.ppo_mini_batch=3",
            "no such key",
        ),
        (
            "",
            "torchrun --nproc_per_nodes=2 mppo/train.py --config recipes/demo.yaml",
            "unrecognized",
        ),
        ("sh", "mppo-report runs/ppo --surve", "unrecognized"),
        ("sh", "mppo-inspect runs/none", "none"),
        ("inline", "make nothing", "No rule"),
        ("inline", 'pip install "mppo[nothing]"', "no extra nothing"),
        ("", "$ mppo-migrate verl < command.sh\nis not in its output", "is not in its output"),
        ("", "python benchmarks/soak.py --engine none", "invalid choice"),
        ("", "a text that nothing explains", "name its language"),
        ("yaml", "actor: {ppo_mini_batch: 3}", "no such key"),
        ("yaml", "actor: {optim: {lr: 1e-6}}", "by the JSON schema"),  # a text in YAML
        ("python", "import mppo.nothing", "ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_on_a_page_is_found(language, text, why, run_of):
    (problem,) = run_of("a.md", text).problems(Block("a.md", 1, language, text))
    assert why in problem


def test_a_wrong_option_of_sbatch_is_found(run_of, slurm):
    if not slurm:
        pytest.skip(missing())
    text = "sbatch --gpus-per-node=9 slurm/ppo.sbatch recipes/x.yaml"
    (problem,) = run_of("a.md", text).problems(Block("a.md", 1, "", text))
    assert "not available" in problem


@pytest.mark.parametrize("pattern", NOT_RUN)
def test_every_exception_is_needed(pattern):
    texts = [block.text for blocks in BLOCKS.values() for block in blocks]
    assert any(re.search(pattern, text, re.MULTILINE) for text in texts)


@pytest.mark.parametrize("file", ["exceptions.py", "page_run.py", "programs.py"])
def test_the_tests_that_run_a_block_instead_exist(file):
    named = re.findall(r"\btest_\w+\.py", (ROOT / "tests/pages" / file).read_text())
    assert named
    files = [*ROOT.glob("tests/*/*.py"), *ROOT.glob("extras/*/tests/*.py")]
    assert set(named) <= {path.name for path in files}
