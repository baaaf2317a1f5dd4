"""An SGLang server on a node of its own, for a run with ``rollout.mode: disaggregated``.

    MPPO_ROLLOUT_API_KEY=... python -m mppo.serve --config recipe.yaml --host 10.0.0.7 --port 30000

It is started as the run would start its own: empty, with the options of the recipe; the run sends
the weights. ``slurm/ppo.sbatch`` starts one per node of a heterogeneous job's second part.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from mppo.config.errors import ConfigError, Fault
from mppo.config.load import load_recipe
from mppo.config.variables import unknown_variables
from mppo.data.builtin import resolve_model
from mppo.parallel import device
from mppo.rollout.checked_load import LOADER
from mppo.rollout.fleet import API_KEY_VARIABLE
from mppo.rollout.sglang_model import engine_faults
from mppo.rollout.sglang_server import check_installed, server_environment, server_options


def main(argv: Sequence[str] | None = None) -> int:
    """Become the server; exit code 2 where the recipe or the key is not right."""
    parser = argparse.ArgumentParser(prog="python -m mppo.serve", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's recipe")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    key = os.environ.get(API_KEY_VARIABLE, "")
    for remark in unknown_variables(os.environ):
        print(f"mppo: {remark}", file=sys.stderr)
    try:
        device.check()
        on_cpu = not device.is_cuda()
        if not key:
            cure = f"export {API_KEY_VARIABLE}=$(openssl rand -hex 16), here and for the run"
            raise ConfigError([Fault(API_KEY_VARIABLE, "", "is not set", cure)], source="serve")
        check_installed(on_cpu)
        content, environment = server_start(
            arguments.config, arguments.overrides, arguments.host, arguments.port, key, on_cpu
        )
    except (ConfigError, RuntimeError, ValueError) as error:
        print(f"mppo: {error}", file=sys.stderr)
        return 2
    # the key is not to be seen in the process table: mkstemp's file is the user's alone
    descriptor, file = tempfile.mkstemp(prefix="mppo_server_", suffix=".yaml")
    with os.fdopen(descriptor, "w") as stream:
        yaml.safe_dump({name.replace("_", "-"): v for name, v in content.items()}, stream)
    command = [sys.executable, "-m", "sglang.launch_server", "--config", file]
    os.execve(sys.executable, command, os.environ | environment)


def server_start(
    config: Path, overrides: Sequence[str], host: str, port: int, api_key: str, on_cpu: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """SGLang's options for the server of a recipe, and the variables it needs.

    Args:
        config: the recipe.
        overrides: to it.
        host, port: where to listen.
        api_key: what clients must present.
        on_cpu: whether it runs on a CPU.
    """
    recipe = load_recipe(config, overrides)
    rollout = recipe.rollout
    folder = resolve_model(recipe.model.path)
    hf_config = AutoConfig.from_pretrained(
        folder, trust_remote_code=recipe.model.trust_remote_code, local_files_only=True
    )
    faults = list(engine_faults(recipe, hf_config, on_cpu))
    if faults:
        raise ConfigError(faults, source=str(config))
    options = server_options(
        str(folder),
        rollout.dtype or recipe.model.dtype,
        rollout.tensor_model_parallel_size,
        0,
        on_cpu,
        rollout.server_args,
        hf_config,
        rollout.expert_parallel_size,
    )
    options["custom_weight_loader"] = [LOADER]
    options |= {"host": host, "port": port, "api_key": api_key}
    return options, server_environment(options["tp_size"], on_cpu, hf_config.model_type)


if __name__ == "__main__":
    sys.exit(main())
