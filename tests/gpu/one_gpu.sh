#!/bin/bash
# All checks that one GPU allows, in under ten minutes, without network, SGLang or Transformer Engine:
#   tests/gpu/one_gpu.sh [--out DIR] [--wheels DIR] [--only NAME ...]
# --wheels DIR: wheels of missing packages, made on another machine by tests/gpu/one_gpu_wheels.sh DIR.
# MPPO_PYTHON chooses the interpreter; default: .venv/bin/python, else python3.
set -eu
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${MPPO_PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python
fi
rest=()
while [ $# -gt 0 ]; do
  if [ "$1" = --wheels ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$2"/*.whl
    shift 2
  else
    rest+=("$1")
    shift
  fi
done
export PYTHONPATH=$root:$root/tests:$root/tests/distributed${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}
"$python" "$root/tests/gpu/one_gpu.py" ${rest[@]+"${rest[@]}"}
