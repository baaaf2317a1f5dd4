"""Serve rewards: a reward model, a Python function, or a sandbox for programs.

    mppo-serve-reward --model models/FsfairX-LLaMA3-RM-v0.1 --port 8000
    mppo-serve-reward --function my_rewards.py:score --kwargs '{"bonus": 0.1}'
    mppo-serve-reward --sandbox

A recipe names the server by reward.name: remote and reward.url; the paths are /score
(reward.format: mppo), /get_reward (openrlhf), /classify (sglang) and /run_code (sandbox_fusion).
The server listens on the loopback interface. On another one (--host), MPPO_REWARD_API_KEY must be
set, here and for the run, which names it in reward.kwargs.api_key_env.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mppo.parallel.launch import keep_imports, prepare_imports
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.extras import PROGRAM_ROUTES
from mppo.recipe.sections.reward import RewardConfig
from mppo.recipe.variables import unknown_variables
from mppo.safety.bounded_http import is_loopback
from mppo.safety.redact import redacted_output
from mppo_reward_server.json_server import JsonServer, Route

PROGRAM = "mppo-serve-reward"
KEY_VARIABLE = "MPPO_REWARD_API_KEY"
"""Environment variable with the key that clients must send."""


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; exit code 2 for an invalid option, model, function or key."""
    arguments = _parser().parse_args(argv)
    for remark in unknown_variables(os.environ):
        print(f"mppo: {remark}", file=sys.stderr)
    try:
        key = _check_key(arguments.host)
        routes = _routes(arguments)
        server = _listen(arguments.host, arguments.port, routes, key)
        keep_imports()
    except (ConfigError, RuntimeError, ValueError) as error:
        print(f"mppo: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    address = f"http://{arguments.host}:{server.server_port}"
    print(f"mppo: serving {', '.join(address + path for path in routes)}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("mppo: the server ends", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="folder of a *ForSequenceClassification with one label")
    what.add_argument("--function", help="as reward.function: module:function or path.py:function")
    what.add_argument("--sandbox", action="store_true", help="run Python programs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    model = parser.add_argument_group("with --model")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    model.add_argument("--batch-size", type=_positive, default=16, help="texts of a forward pass")
    model.add_argument("--max-length", type=_positive, help="most tokens of a text")
    model.add_argument("--trust-remote-code", action="store_true", help="run the folder's code")
    function = parser.add_argument_group("with --function")
    function.add_argument("--kwargs", default="{}", help="further arguments, a JSON object")
    function.add_argument("--timeout-s", type=float, default=60.0, help="time for one response")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _check_key(host: str) -> str:
    """The key of clients; a ``ConfigError`` if there is none and others can reach the server."""
    key = os.environ.get(KEY_VARIABLE, "")
    if key and not (key.isascii() and key.isprintable()):
        fix = "set it to the key alone"
        raise _error(KEY_VARIABLE, "", "holds characters that no HTTP header can hold", fix)
    if not key and not is_loopback(host):
        fix = "set it to a long random text, here and for the run"
        raise _error(KEY_VARIABLE, "", f"is not set, and --host {host} is open to others", fix)
    if not key:
        print(
            f"mppo: {KEY_VARIABLE} is not set: every user of this machine may send requests",
            file=sys.stderr,
        )
    return key


def _routes(arguments: argparse.Namespace) -> Mapping[str, Route]:
    if arguments.sandbox:
        return PROGRAM_ROUTES.load("--sandbox", True, PROGRAM)()
    prepare_imports()
    from mppo_reward_server.routes import function_routes, model_routes  # here: they import torch

    if arguments.function:
        from mppo.rewards.scorer import build_reward_function

        return function_routes(build_reward_function(_function_section(arguments)))
    from mppo.parallel import device
    from mppo_reward_server.sequence_classifier import load_sequence_classifier

    device.check()
    return model_routes(
        load_sequence_classifier(
            arguments.model,
            arguments.dtype,
            arguments.batch_size,
            arguments.max_length,
            arguments.trust_remote_code,
        )
    )


def _function_section(arguments: argparse.Namespace) -> RewardConfig:
    try:
        kwargs: Any = json.loads(arguments.kwargs)
    except ValueError as error:
        raise _error("--kwargs", arguments.kwargs, f"is not JSON: {error}", "give an object") from (
            error
        )
    if not isinstance(kwargs, dict):
        raise _error("--kwargs", arguments.kwargs, "is not an object", 'write {"name": value}')
    if not arguments.timeout_s > 0:
        raise _error("--timeout-s", arguments.timeout_s, "is not positive", "give seconds")
    return RewardConfig(
        name="function",
        function=arguments.function,
        kwargs=kwargs,
        timeout_s=arguments.timeout_s,
    )


def _listen(host: str, port: int, routes: Mapping[str, Route], key: str) -> JsonServer:
    try:
        return JsonServer(host, port, routes, key)
    except (OSError, OverflowError) as error:
        why = f"cannot listen there: {getattr(error, 'strerror', None) or error}"
        fix = "choose a free port (--port), and an address of this machine (--host)"
        raise _error("--port", f"{host}:{port}", why, fix) from error


def _error(key: str, value: Any, why: str, fix: str) -> ConfigError:
    return ConfigError([ConfigIssue(key, value, why, fix)], source=PROGRAM)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
