#!/bin/bash
# All checks that one GPU allows, in under ten minutes, without network, SGLang or Transformer Engine:
#   tests/gpu/one_gpu.sh [--out DIR] [--wheels DIR] [--only NAME ...] [--commit HASH] [--device cpu]
# --wheels DIR: wheels of missing packages, made on another machine by tests/gpu/one_gpu_wheels.sh DIR.
# MPPO_PYTHON chooses the interpreter; default: .venv/bin/python, else python3.
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
rest=()
while [ $# -gt 0 ]; do
  if [ "$1" = --wheels ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
      --target "$site" "$2"/*.whl
    export PYTHONPATH=$PYTHONPATH:$site
    shift 2
  else
    rest+=("$1")
    shift
  fi
done
"$python" "$root/tests/gpu/one_gpu.py" ${rest[@]+"${rest[@]}"}
