"""What each program that a page names does in a test: the real thing wherever that is cheap.

``run`` is called in a process of its own (``page_server``), with the page's folder, variables and
streams. ``HOW`` and ``OTHERS`` say how a module or another project's program runs.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(".venv/bin")
"""In a page's folder: the links to ``page_client``."""
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("extras/*/pyproject.toml"))]
SCRIPTS = {
    name: module
    for project in PROJECTS
    for name, module in re.findall(
        r'^(mppo-[\w-]+) = "([\w.]+):main"$', project.read_text(), re.MULTILINE
    )
}
"""Modules of the installed programs."""
LEFT_OUT = "..."
SERVER_S = 300.0
"""Within this time a server must say its address."""


class Wrong(SystemExit):
    """The page's command is wrong."""


def run(name: str, arguments: list[str]) -> int:
    """Run a program by its name; its exit code."""
    if name in SCRIPTS:
        return run_module(SCRIPTS[name], arguments)
    return OTHERS[name](arguments)


def names() -> list[str]:
    """Every name for which a page's folder has a link."""
    return sorted([*SCRIPTS, *OTHERS])


def python(arguments: list[str], ranks: int = 1, nodes: int = 1) -> int:
    """``python`` with a module, a file or a program text, on this many ranks per node."""
    option, *rest = arguments
    in_folder = option not in ("-c", "-m")
    sys.path.insert(0, str(Path(option).parent.resolve()) if in_folder else os.getcwd())
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<page>", "exec"), {"__name__": "__main__"})
        return 0
    if option == "-m":
        return run_module(rest[0], rest[1:], ranks, nodes)
    if not Path(option).is_file():
        raise Wrong(f"there is no {option}")
    return run_module(option.removesuffix(".py").replace("/", "."), rest, ranks, nodes)


def run_module(module: str, arguments: list[str], ranks: int = 1, nodes: int = 1) -> int:
    """A module's program, in the way of ``HOW``, else as it is on every rank."""
    if module in MODULES_OF_OTHERS:
        return MODULES_OF_OTHERS[module](arguments)
    if (LEFT_OUT in arguments or not arguments) and module != "mppo.train":
        return check_arguments(module, arguments)
    for how, pattern in HOW:
        if re.fullmatch(pattern, " ".join([module, *arguments])):
            return how(module, arguments, ranks, nodes)
    return on_ranks(module, arguments, ranks)


def main_of(module: str, arguments: Sequence[str]) -> int:
    """The module as ``python -m`` runs it; its exit code."""
    folder = ROOT / module.replace(".", "/")
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(f"{module}.__main__" if folder.is_dir() else module, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def on_ranks(module: str, arguments: Sequence[str], ranks: int) -> int:
    """The module on this many forked ranks with a launcher's variables."""
    if ranks == 1:
        return main_of(module, arguments)
    from mppo.parallel.addresses import free_port

    place = _launched(ranks, ranks, free_port())
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            code = 86
            try:
                code = main_of(module, arguments)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255 for pid in children)


def _launched(world: int, per_node: int, port: int) -> dict[str, str]:
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": per_node}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {key: str(value) for key, value in place.items()}


def train(module: str, arguments: list[str], ranks: int, nodes: int) -> int:
    """The plan of a run, with all checks of its recipe; a real run where the page has settings that
    make it small (``PAGE_SMALL``) and the recipe is for the CPU."""
    arguments = [word for word in arguments if word != LEFT_OUT]
    if not {"--config", "-h", "--help"} & set(arguments):
        arguments += ["--config", "recipes/tiny_cpu_tp2_pp2.yaml"]
        ranks = 4
    small = os.environ.get("PAGE_SMALL", "").split()
    if "--dry-run" not in arguments:
        if small and _is_for_the_cpu(arguments):
            return on_ranks(module, [*arguments, *small], ranks)
        arguments.append("--dry-run")
        if ranks * nodes > 1:
            os.environ.update(_launched(ranks * nodes, ranks, 1))
    return main_of(module, arguments)


def _is_for_the_cpu(arguments: Sequence[str]) -> bool:
    from mppo.recipe.load import load_recipe

    overrides = [word for word in arguments if re.match(r"[\w.]+=", word)]
    config = arguments[arguments.index("--config") + 1]
    return load_recipe(config, overrides).rollout.name == "local"


def simulate(module: str, arguments: list[str], *_: int) -> int:
    """One step in the server without Megatron's stand-ins for the CPU. Without ``--quick``, which
    takes minutes: options and recipe, or the plan."""
    if "--dry-run" in arguments:
        return main_of(module, [word for word in arguments if word != "--simulate"])
    if "--quick" not in arguments:
        return check_arguments(module, arguments)
    if "--transformer-engine" in arguments and not Path("te/transformer_engine").is_dir():
        return check_arguments(module, arguments)  # it is not installed here
    server = os.environ["PAGE_SIMULATING"]
    if os.environ["PAGE_SERVER"] != server:
        os.environ["PAGE_SERVER"] = server
        os.environ.pop("MPPO_DEVICE")
        os.execv(BIN / "python", ["python", "-m", module, *arguments])
    return main_of(module, [*arguments, "--steps", "1"])


def until_it_serves(module: str, arguments: list[str], *_: int) -> int:
    """A server until it prints its address; then Ctrl-C must end it with exit code 0."""
    if module.startswith("mppo_reward_server"):  # the page's port may be in use
        arguments = [*arguments, "--port", "0"]
    if "--serve" in arguments:
        arguments = [*arguments, "--port", "0"]
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(sender, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
        code = 86
        try:
            code = main_of(module, arguments)
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(sender)
    timer = threading.Timer(SERVER_S, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with os.fdopen(receiver) as output:
        for line in output:
            print(line, end="")
            if "http://127.0.0.1:" in line:
                time.sleep(0.1)  # it may still enter its loop
                os.kill(pid, signal.SIGINT)
    timer.cancel()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255


def check_arguments(module: str, arguments: list[str], *_: int) -> int:
    """The module's own parser accepts the values and has the options; a recipe it is given loads
    with the keys."""
    from mppo.recipe.load import load_recipe

    given = [word for word in arguments if word != LEFT_OUT]
    text = io.StringIO()
    with redirect_stdout(text):
        code = main_of(module, [*given, "--help"])
    _check_options(module, given, text.getvalue())
    if "--config" in given:
        keys = [word for word in given if re.match(r"[\w.]+=", word)]
        load_recipe(given[given.index("--config") + 1], keys)
    return code


def _check_options(program: str, arguments: Sequence[str], known: str) -> None:
    for word in arguments:
        option = word.partition("=")[0]
        if re.match(r"--?[a-z]", option) and not re.search(rf"(?<![\w-]){option}(?![\w-])", known):
            raise Wrong(f"{program} has no option {option}")


def torchrun(arguments: list[str]) -> int:
    """Ranks as torchrun would start them, by torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    given = [word for word in arguments if word != LEFT_OUT]
    if not any(word == "-m" or not word.startswith("-") for word in given):  # options alone
        _check_options("torchrun", given, parser.format_help())
        return 0
    found = parser.parse_args(given)
    target = ["-m", found.training_script] if found.module else [found.training_script]
    rest = [*found.training_script_args, *([LEFT_OUT] if LEFT_OUT in arguments else [])]
    nodes = int(str(found.nnodes).partition(":")[0])
    return python([*target, *rest], int(found.nproc_per_node), nodes)


def mpirun(arguments: list[str]) -> int:
    """Ranks as mpirun would start them. (mpirun itself starts ranks in tests/distributed and
    tests/end_to_end.)"""
    if arguments[0] != "-n" or arguments[2] != "python":
        raise Wrong(f"mpirun {arguments}: expected -n RANKS python ...")
    return python(arguments[3:], int(arguments[1]))


def srun(arguments: list[str]) -> int:
    """Options by the real srun's help; a program as on one rank."""
    options = [word for word in arguments if word.startswith("--")]
    if options and shutil.which("srun", path=os.environ["PAGE_PATH"]):
        _check_options("srun", options, _real(["srun", "--help"]).stdout)
    rest = arguments[len(options) :]
    return python(rest[1:]) if rest else 0


def _real(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A program of this machine instead of a page's link."""
    environment = os.environ | {"PATH": os.environ["PAGE_PATH"]}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def make(arguments: list[str]) -> int:
    """``make --dry-run``; where the target trains, the plan of the run it would start."""
    found = _real(["make", "--dry-run", "--always-make", "-C", str(ROOT), *arguments])
    if found.returncode:
        raise Wrong(found.stderr)
    trains = [line for line in found.stdout.splitlines() if "mppo/train.py" in line]
    return max(
        (subprocess.run(["bash", "-ec", line.strip()]).returncode for line in trains), default=0
    )


def pip(arguments: list[str]) -> int:
    """pip's own parser; extras that pyproject.toml has, and versions that it or a program pins."""
    from packaging.requirements import Requirement
    from pip._internal.commands import create_command

    command, *rest = arguments
    options, names = create_command(command).parse_args(rest)
    project = (ROOT / "pyproject.toml").read_text()
    pinning = project + "".join(
        path.read_text()
        for path in (ROOT / "Makefile", ROOT / "mppo/hub/smollm2.py")
    )  # fmt: skip
    for name in [*names, *(options.editables or [])]:
        extras = re.search(r"\[([\w,-]+)\]$", name)
        if name.startswith((".", "mppo[")):
            for extra in extras[1].split(",") if extras else ():
                if f"\n{extra} = [" not in project:
                    raise Wrong(f"pyproject.toml has no extra {extra}")
            if name.startswith("./extras/") and not (ROOT / name / "pyproject.toml").is_file():
                raise Wrong(f"there is no package {name}")
            continue
        requirement = Requirement(name)
        if requirement.specifier and name not in pinning:
            raise Wrong(
                f"{name}: not the version that the Makefile, pyproject.toml or a program has"
            )
    return 0


def hf(arguments: list[str]) -> int:
    """The options of the Hub's program, which needs the network to do more."""
    known = _real([str(Path(sys.executable).with_name("hf")), *arguments, "--help"])
    _check_options("hf", arguments, known.stdout)
    return known.returncode


def sbatch(arguments: list[str]) -> int:
    """The real ``sbatch --test-only`` if a controller runs; the script's program with its arguments
    as on the requested nodes, except that a run is only planned."""
    given = [word for word in arguments if word != LEFT_OUT]
    given = ["recipes/x.yaml" if word == "RECIPE" else word for word in given]
    scripts = [word for word in given if word.endswith(".sbatch")]
    if "SLURM_CONF" in os.environ:
        target = [] if scripts else ["slurm/ppo.sbatch"]
        found = _real(["sbatch", "--test-only", *given, *target])
        print(found.stdout + found.stderr)
        if found.returncode:
            return found.returncode
    if not scripts:
        return 0
    position = given.index(scripts[0])
    mine = " ".join(given[: given.index(":") if ":" in given else position])
    nodes = int(found[1]) if (found := re.search(r"--nodes=(\d+)", mine)) else 1
    gpus = int(found[1]) if (found := re.search(r"--gpus-per-node=(\d+)", mine)) else 8
    rest = given[position + 1 :]
    if scripts[0].endswith("convert.sbatch"):
        rest = [*rest, LEFT_OUT] if LEFT_OUT in arguments else rest
        return run_module("checkpoints_convert", rest)
    if not Path(rest[0]).is_file():
        raise Wrong(f"there is no {rest[0]}")
    if scripts[0].endswith("eval.sbatch"):  # recipes for GPUs; test_evaluate.py evaluates
        return check_arguments("mppo.evaluate", ["--config", *rest])
    if rest[0] == "recipes/x.yaml":  # any recipe, for any number of nodes
        rest.append(f"trainer.nnodes={nodes}")
    return run_module("mppo.train", ["--config", *rest], gpus, nodes)


def scancel(arguments: list[str]) -> int:
    """Options by the real scancel's help; without options a waiting job is really cancelled.
    (Signals need a job that runs: tests/cluster/test_slurm.py.)"""
    if "SLURM_CONF" not in os.environ:
        return 0
    if len(arguments) > 1:
        _check_options("scancel", arguments, _real(["scancel", "--help"]).stdout)
        return 0
    job = _real(["sbatch", "--parsable", "--hold", "slurm/ppo.sbatch"]).stdout.strip()
    found = _real(["scancel", job])
    print(found.stdout + found.stderr)
    return found.returncode


GPU_SCRIPTS = {"run_all.sh": "gpu_checks.py", "one_gpu.sh": "one_gpu.py", "one_gpu_wheels.sh": ""}
"""Scripts in ``tests/gpu``, and the program there that knows their options."""


def gpu_script(name: str, arguments: list[str]) -> int:
    _check_options(name, arguments, (ROOT / "tests/gpu" / (GPU_SCRIPTS[name] or name)).read_text())
    return 0


def venv(arguments: list[str]) -> int:
    """A real environment, without pip, whose installation takes seconds, in another folder."""
    folders = [f"new-{word}" for word in arguments] or ["new"]
    return main_of("venv", ["--without-pip", *folders])


def pytest(arguments: list[str]) -> int:
    """The file's tests are found; other tests of this run execute them."""
    files = [word for word in arguments if not word.startswith("-")]
    found = _real([str(Path(sys.executable)), "-m", "pytest", "--collect-only", "-q", *files])
    return found.returncode


Program = Callable[[list[str]], int]
How = Callable[[str, list[str], int, int], int]

OTHERS: dict[str, Program] = {
    "python": python, "python3": python, "torchrun": torchrun, "mpirun": mpirun, "srun": srun,
    "make": make, "pip": pip, "hf": hf, "sbatch": sbatch, "scancel": scancel,
    **{name: partial(gpu_script, name) for name in GPU_SCRIPTS},
}  # fmt: skip
MODULES_OF_OTHERS: dict[str, Program] = {
    "torch.distributed.run": torchrun,
    "venv": venv,
    "pytest": pytest,
}
HOW: list[tuple[How, str]] = [
    (simulate, r"mppo_simulate\b.*|mppo\.train .*--simulate.*"),
    (train, r"mppo\.train\b.*"),
    (until_it_serves, r"mppo_reward_server\b.*|mppo\.report\.html\.program .*--serve.*"),
    (check_arguments, r"benchmarks\..*"),  # tests/end_to_end/test_benchmarks.py runs them
    (check_arguments, r"mppo\.serve\b.*"),  # tests/end_to_end/test_serve_actor.py
    (check_arguments, r"mppo\.replay\b.*"),  # tests/end_to_end/test_faults.py
    (check_arguments, r"mppo\.hub\.smollm2\b.*"),  # needs the weights in a package
]
"""How modules run whose real run is too long here, by a pattern of module and arguments; all others
run as they are."""
