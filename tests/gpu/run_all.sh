#!/bin/bash
# All checks that need GPUs, on one node with 8 of them, in about half an hour (an estimate); one report file:
#   tests/gpu/run_all.sh [--out DIR] [--only NAME ...] [--commit HASH]
# MPPO_PYTHON chooses the interpreter; default: .venv/bin/python, else python3.
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$python" "$root/tests/gpu/gpu_checks.py" "$@"
