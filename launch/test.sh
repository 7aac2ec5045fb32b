#!/usr/bin/env bash
# Lint, types, the package as a wheel, and every test that this machine can run; test_engines.sh runs the plug-ins'.
set -euo pipefail
. "$(dirname "$0")/setup.sh" '[dev]'
ruff check .
mypy
python launch/check_package.py
# Three workers, also on two cores: most of a test is waiting, for processes of its own to start or for each other.
exec python -m pytest --numprocesses 3 --dist worksteal --ignore tests/engines "$@"
