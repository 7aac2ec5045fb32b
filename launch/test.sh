#!/usr/bin/env bash
# Lint, types, the package as a wheel, and every test that this machine can run; test_engines.sh runs the plug-ins'.
set -euo pipefail
. "$(dirname "$0")/setup.sh" '[dev]'
ruff check .
mypy
python launch/check_package.py
exec python launch/run_tests.py cpu "$@"
