# For the scripts here, which source it: the root of the repository, and the interpreter.
# MPPO_PYTHON chooses the interpreter; default: .venv/bin/python, else python3.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${MPPO_PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python
fi
if ! command -v "$python" >/dev/null; then
  echo "mppo: $python: no such interpreter; choose one with torch by MPPO_PYTHON" >&2
  exit 2
fi
# the checks run mppo of this folder, with or without an installed one
export PYTHONPATH=$root:$root/extras/simulate:$root/tests/support:$root/tests/distributed${PYTHONPATH:+:$PYTHONPATH}
