#!/usr/bin/env bash
# Lint, types and every test that this machine can run.
set -euo pipefail
. "$(dirname "$0")/setup.sh" '[dev]'
ruff check .
mypy
exec python -m pytest "$@"
