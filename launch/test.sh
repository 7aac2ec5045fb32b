#!/usr/bin/env bash
# Lint, types, the package as a wheel, and the tests that this machine can run; test_engines.sh runs the plug-ins'.
#   launch/test.sh [--all] [--record | --again] [arguments of pytest]
#   --all runs the thorough tests, too (more shapes of what others meet), and draws ten times the examples
set -euo pipefail
. "$(dirname "$0")/setup.sh" '[dev]'
ruff check .
mypy
python launch/check_package.py
exec python launch/run_tests.py cpu "$@"
