"""An SGLang server that mppo starts: its options, environment and command line."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from mppo.parallel import device
from mppo.parallel.addresses import free_port
from mppo.parallel.environment import for_server
from mppo.recipe.rules.engine_rules import sglang_options
from mppo.rollout.sglang.http_client import RequestRefused
from mppo.rollout.sglang.model_support import (
    CAPPED_BACKEND,
    CPU_BACKEND,
    MODEL_PACKAGE,
    OWN_CLASSES,
    sglang_settings,
)
from mppo.rollout.sglang.server_api import SGLangApi
from mppo.rollout.sglang.server_process import ServerProcess
from mppo.safety.temporary import own_folder, private_file

HOST = "127.0.0.1"
_SEEDS = 1 << 31
"""Numbers that torch, numpy and SGLang all take as a seed."""
_LONGEST_SOCKET_FOLDER = 90
"""Characters; the path of a Unix socket in the folder may have 107."""
_CPU_OPTIONS: dict[str, Any] = {
    "attention_backend": CPU_BACKEND,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 32768,
    "max_running_requests": 256,
    "sleep_on_idle": True,
    "skip_server_warmup": True,  # the health check generates a token anyway
}
_SLEEPING_OPTIONS: dict[str, Any] = {
    "enable_memory_saver": True,
    # SGLang's default, breakable graphs, does not start with SGLANG_MEMORY_SAVER_CUDA_GRAPH
    "cuda_graph_backend_prefill": "disabled",
}


def check_installed(on_cpu: bool) -> None:
    """Check that SGLang is installed, and on a CPU its compatibility package; RuntimeError with the
    command that installs what is missing."""
    if find_spec("sglang") is None:
        fix = "make sglang-cpu" if on_cpu else 'pip install "mppo[gpu]"'
        raise RuntimeError(f"rollout.name=sglang needs SGLang, which is not installed: {fix}")
    if on_cpu and find_spec("sglang_cpu_compat") is None:
        raise RuntimeError(
            "SGLang on a CPU needs the package in extras/sglang_cpu: make sglang-cpu "
            "(or pip install --no-deps ./extras/sglang_cpu)"
        )


def server_options(
    model_path: str,
    dtype: str,
    tensor_parallel: int,
    on_cpu: bool,
    server_args: Mapping[str, Any],
    hf_config: Any,
    expert_parallel: int = 1,
    with_weights: bool = False,
    sleeps: bool = True,
) -> dict[str, Any]:
    """SGLang's options for a server, without host, port, key and random seed.

    Args:
        server_args: ``rollout.server_args``; they override every default here.
        expert_parallel: groups of the server's ranks among which its experts are divided.
        with_weights: load the folder's weights and tokenizer; False: read only its
            configuration, start with dummy weights, and receive weights by sync.
        sleeps: the server releases its memory while its GPUs train.
    """
    options: dict[str, Any] = {
        "model_path": model_path,
        "dtype": dtype,
        "tp_size": tensor_parallel,
        "ep_size": expert_parallel,
        "load_format": "auto" if with_weights else "dummy",
        "skip_tokenizer_init": not with_weights,
        "log_level": "warning",
    }
    settings = sglang_settings(hf_config)
    if settings:
        options["json_model_override_args"] = json.dumps(settings)
    if on_cpu:
        options |= {"device": "cpu", **_CPU_OPTIONS}
    else:
        if sleeps:
            options |= _SLEEPING_OPTIONS
        if getattr(hf_config, "attn_logit_softcapping", None):
            options["attention_backend"] = CAPPED_BACKEND
    return options | sglang_options(server_args)


def server_environment(tensor_parallel: int, on_cpu: bool, model_type: str) -> dict[str, str]:
    """Environment variables that a server for a model type needs besides the inherited ones."""
    variables = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    if model_type in OWN_CLASSES:
        variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] = MODEL_PACKAGE
    if len(str(own_folder())) <= _LONGEST_SOCKET_FOLDER:
        variables["TMPDIR"] = str(own_folder())  # where SGLang creates its sockets, and leaves them
        compiled = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        variables["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)
    if on_cpu:
        threads = os.environ.get("MPPO_SGLANG_THREADS", "1")
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": threads}
        # SGLang compiles a few functions for GPUs; on a CPU that costs half a minute
        variables["TORCHDYNAMO_DISABLE"] = "1"
        if tensor_parallel > 1:
            cores = sorted(os.sched_getaffinity(0))
            bound = [str(cores[i % len(cores)]) for i in range(tensor_parallel)]
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return variables


def sleeping_environment(gpus: Sequence[int]) -> dict[str, str]:
    """Further environment variables of a server that shares its GPUs (see ``device.visible_gpus``)
    with training ranks."""
    return {
        **device.visible_gpus(gpus),
        # without it, the memory of captured graphs stays allocated when it is released
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        # SGLang does not start on GPUs of which one has less free memory than another; training
        # ranks hold unequal amounts
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    }


def launch_command(options: Mapping[str, Any]) -> list[str]:
    """SGLang's command line. The options, key included, are in a file that only this user can read:
    the process table must not show the key."""
    config = own_folder() / f"server_{options['port']}.yaml"
    content = {name.replace("_", "-"): value for name, value in options.items()}
    private_file(config, yaml.safe_dump(content))
    return [sys.executable, "-m", "sglang.launch_server", "--config", str(config)]


def own_server(
    index: int,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    api_key: str,
    folder: Path,
    start_timeout_s: float,
    broadcasts: bool = False,
    random_seed: Callable[[], int] | None = None,
) -> ServerProcess:
    """A server process, not yet started. ``broadcasts``: it receives weights by
    ``rollout.sync=distributed``; ``random_seed``: of each start, None: SGLang draws one."""

    def command(port: int) -> list[str]:
        # SGLang would pick this port from the ephemeral range, long before it listens on it
        given = {"nccl_port": free_port(), **options, "port": port}
        if random_seed is not None:
            given["random_seed"] = random_seed()
        return launch_command({**given, "host": HOST, "api_key": api_key})

    return ServerProcess(
        name=f"SGLang server {index}",
        command=command,
        environment={**for_server(os.environ, broadcasts), **environment},
        log=folder / f"server_{index}.log",
        is_up=lambda port: is_ours(SGLangApi(f"http://{HOST}:{port}", api_key, 5.0)),
        start_timeout_s=start_timeout_s,
    )


def is_ours(api: SGLangApi) -> bool:
    """Whether the client's server is up, and not another program on the same port."""
    try:
        return api.is_up() and api.accepts_key() is True
    except RequestRefused:
        return False


def server_seed(seed: int, server: int, start: int) -> int:
    """SGLang's random seed for a start of a server; the servers of one start have distinct seeds.

    Servers with equal seeds return equal samples of equal prompts. One that starts again, after
    ``start`` earlier ones, must not repeat its random numbers either.
    """
    digest = hashlib.sha256(f"{seed} {start}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") + server) % _SEEDS


def shared_randomness(options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Warnings about servers that draw equal random numbers, from the ``random_seed`` and
    ``dp_size`` of each server by its URL; None: not told."""
    of_seed: defaultdict[int, list[str]] = defaultdict(list)
    for url, given in sorted(options.items()):
        if isinstance(given["random_seed"], int):
            of_seed[given["random_seed"]].append(url)
    again = "samples of a prompt repeat"
    found = [
        f"the servers at {', '.join(urls)} (rollout.urls) have the same random_seed {seed}, so "
        f"{again}: start each with another --random-seed, or without"
        for seed, urls in of_seed.items()
        if len(urls) > 1
    ]
    return found + [
        f"the server at {url} (rollout.urls) has {given['dp_size']} replicas (dp_size) of one "
        f"random_seed, so {again}: start a server for each instead"
        for url, given in sorted(options.items())
        if isinstance(given["dp_size"], int) and given["dp_size"] > 1
    ]
