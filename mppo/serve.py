"""Serve a model with SGLang: for chat, or as the rollout server of a run on another node.

    python -m mppo.serve --config RUN/recipe.yaml --host 127.0.0.1 --port 30000 model.path=RUN/actor

``MPPO_ROLLOUT_API_KEY`` is the key that clients send; ``openssl rand -hex 16`` prints a random one.
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

from mppo.parallel.launch import prepare_imports
from mppo.recipe.errors import ConfigError, config_error
from mppo.recipe.variables import unknown_variables
from mppo.safety.redact import redacted_output
from mppo.safety.temporary import PRIVATE

# modules that import torch are imported inside functions: --help needs none of them


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Become the server; exit code 2 for an invalid recipe, model, address or key."""
    arguments = _parser().parse_intermixed_args(argv)
    prepare_imports()
    from mppo.parallel import device
    from mppo.rollout.served_model import server_start
    from mppo.rollout.sglang.fleet import API_KEY_VARIABLE
    from mppo.rollout.sglang.server_options import check_installed, launch_command

    key = os.environ.get(API_KEY_VARIABLE, "")
    for remark in unknown_variables(os.environ):
        print(f"mppo: {remark}", file=sys.stderr)
    try:
        device.check()
        on_cpu = not device.is_cuda()
        if not key:
            # written as an assignment, the redaction of secrets would hide it
            fix = "export what `openssl rand -hex 16` prints, here and for clients"
            raise config_error(API_KEY_VARIABLE, "", "is not set", fix, source="serve")
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


def _check_address(host: str, port: int) -> None:
    try:
        family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except (OSError, OverflowError) as error:
        fix = "choose a free port (--port), and an address of this machine (--host)"
        why = f"cannot listen there: {getattr(error, 'strerror', None) or error}"
        raise config_error("--port", f"{host}:{port}", why, fix, source="serve") from error


if __name__ == "__main__":
    sys.exit(main())
