#!/bin/bash
# All checks that need GPUs, on one node with 8 of them, in about fifteen minutes; one report file:
#   tests/gpu/run_all.sh [--out DIR] [--only NAME ...]
# MPPO_PYTHON chooses the interpreter; default: .venv/bin/python, else python3.
set -eu
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${MPPO_PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python
fi
# the checks run mppo of this folder, with or without an installed one
export PYTHONPATH=$root:$root/tests:$root/tests/distributed${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$root/tests/gpu/gpu_checks.py" "$@"
