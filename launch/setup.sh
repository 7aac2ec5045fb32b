# Sourced by demo.sh and test.sh: a virtual environment in .venv with this package in it.
# Usage: . launch/setup.sh [EXTRA], e.g. `. launch/setup.sh '[dev]'`; without one '[engine]', what models and commands need.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/python ]; then
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dcpmla needs Python 3.11 or later; set PYTHON to one" >&2; exit 1; }
  "${PYTHON:-python3}" -m venv .venv
fi
. .venv/bin/activate
# The version that this project is tested with; for the small CPU-only build, point pip at PyTorch's CPU wheels (PIP_FIND_LINKS or an index).
python -c 'import torch' 2>/dev/null || pip install --quiet torch==2.13.0
pip install --quiet --disable-pip-version-check --constraint launch/constraints.txt --editable ".${1:-[engine]}"
