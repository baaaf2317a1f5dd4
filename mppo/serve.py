"""Serve a model with SGLang: for chat, or as the rollout server of a run on another node.

    export MPPO_ROLLOUT_API_KEY=$(openssl rand -hex 16)
    python -m mppo.serve --config RUN/recipe.yaml --host 127.0.0.1 --port 30000 model.path=RUN/actor

The server has the weights of ``model.path`` and SGLang's OpenAI-compatible endpoints
(/v1/chat/completions). With ``--empty`` it reads no weights and waits for those of a run with
``rollout.mode: disaggregated``. ``slurm/ppo.sbatch`` starts one such server on each node of the
second component of a heterogeneous job.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.load import read_recipe, source_name
from mppo.config.rules.files import check_model_folder, is_hub_name
from mppo.config.schema import Recipe
from mppo.config.variables import unknown_variables
from mppo.hub.builtin import load_tokenizer, read_model_config, resolve_model
from mppo.hub.download import fetch_model
from mppo.parallel import device
from mppo.rollout.sglang.fleet import API_KEY_VARIABLE
from mppo.rollout.sglang.model_support import engine_issues
from mppo.rollout.sglang.server_options import (
    check_installed,
    launch_command,
    server_environment,
    server_options,
)
from mppo.rollout.transport.checked_load import LOADER
from mppo.safety.private import PRIVATE
from mppo.safety.redact import redacted_output
from mppo.weights.model_folder import companion_folder, is_megatron_checkpoint


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Become the server; exit code 2 for an invalid recipe, model, address or key."""
    arguments = _parser().parse_intermixed_args(argv)
    key = os.environ.get(API_KEY_VARIABLE, "")
    for remark in unknown_variables(os.environ):
        print(f"mppo: {remark}", file=sys.stderr)
    try:
        device.check()
        on_cpu = not device.is_cuda()
        if not key:
            fix = f"export {API_KEY_VARIABLE}=$(openssl rand -hex 16), here and for clients"
            raise ConfigError(
                [ConfigIssue(API_KEY_VARIABLE, "", "is not set", fix)], source="serve"
            )
        check_installed(on_cpu)
        content, environment = server_start(
            arguments.config, arguments.overrides, arguments.empty, on_cpu
        )
        _check_address(arguments.host, arguments.port)
    except (ConfigError, RuntimeError, ValueError) as error:
        print(f"mppo: {error}", file=sys.stderr)
        return 2
    what = "random weights until a run sends its weights" if arguments.empty else "its weights"
    print(f"mppo: serving {content['model_path']} with {what}", file=sys.stderr, flush=True)
    content |= {"host": arguments.host, "port": arguments.port, "api_key": key}
    os.umask(PRIVATE)
    os.execve(sys.executable, launch_command(content), os.environ | environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mppo.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="recipe (YAML)")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--empty", action="store_true", help="read no weights; a run will send them"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def server_start(
    config: Path, overrides: Sequence[str], empty: bool, on_cpu: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Options and environment of the server for a recipe.

    Args:
        config: the recipe file.
        overrides: ``section.key=value`` settings.
        empty: start without weights.
        on_cpu: whether the server runs on a CPU.

    Returns:
        SGLang's options, without address and key, and the environment variables to add.

    Raises:
        ConfigError: the recipe is invalid, or the model cannot be served.
    """
    remarks: list[str] = []
    recipe, issues = read_recipe(config, overrides, remarks)
    if recipe is None or issues:
        raise ConfigError(issues, source=source_name(config))
    folder = _empty_folder(recipe) if empty else _model_folder(recipe)
    if not empty:
        remarks += _chat_remarks(recipe, folder)
    for remark in remarks:
        print(f"mppo: {remark}", file=sys.stderr)
    rollout, trust = recipe.rollout, recipe.model.trust_remote_code
    hf_config = read_model_config(folder, trust)
    served = recipe.model_copy(update={"rollout": rollout.model_copy(update={"name": "sglang"})})
    issues = list(engine_issues(served, hf_config, on_cpu))
    if issues:
        raise ConfigError(issues, source=source_name(config))
    options = server_options(
        str(folder),
        rollout.dtype or recipe.model.dtype,
        rollout.tensor_model_parallel_size,
        on_cpu,
        rollout.server_args,
        hf_config,
        rollout.expert_parallel_size,
        with_weights=not empty,
        sleeps=False,
    )
    options["custom_weight_loader"] = [LOADER]
    if not empty and trust:
        options["trust_remote_code"] = True
    if not empty and recipe.model.tokenizer_path:
        options["tokenizer_path"] = recipe.model.tokenizer_path
    return options, server_environment(options["tp_size"], on_cpu, hf_config.model_type)


def _empty_folder(recipe: Recipe) -> Path:
    """The folder with the configuration of a server without weights."""
    return companion_folder(resolve_model(recipe.model.path))


def _model_folder(recipe: Recipe) -> Path:
    """The folder with the served weights.

    Raises:
        ConfigError: SGLang cannot read the model.
    """
    name, model = recipe.model.path, recipe.model
    if model.hub and is_hub_name(name):
        name = str(fetch_model(name, model.hub, True, model.trust_remote_code))
    issues = check_model_folder("model.path", name)
    folder = Path(name) if issues else resolve_model(name, seed=recipe.trainer.seed)
    if not issues and is_megatron_checkpoint(folder):
        fix = "export it with python -m checkpoints_convert export, and serve that folder"
        issues = [
            ConfigIssue(
                "model.path", name, "is a Megatron checkpoint, which SGLang cannot read", fix
            )
        ]
    if issues:
        raise ConfigError(issues, source="serve")
    return folder


def _chat_remarks(recipe: Recipe, folder: Path) -> list[str]:
    """A line for the log if the server cannot answer chat requests."""
    model = recipe.model
    tokenizer = load_tokenizer(model.tokenizer_path or folder, model.trust_remote_code)
    if tokenizer.chat_template:
        return []
    return ["the tokenizer has no chat template: use /v1/completions, not /v1/chat/completions"]


def _check_address(host: str, port: int) -> None:
    """Raise ``ConfigError`` if the server cannot listen on that address."""
    try:
        family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except (OSError, OverflowError) as error:
        fix = "choose a free port (--port), and an address of this machine (--host)"
        why = f"cannot listen there: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(
            [ConfigIssue("--port", f"{host}:{port}", why, fix)], source="serve"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
