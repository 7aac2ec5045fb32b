#!/usr/bin/env bash
# The tests that need GPUs, with the Python that runs this (torch for CUDA installed); those that want more GPUs than there are skip.
set -euo pipefail
cd "$(dirname "$0")/.."
exec env PYTHONPATH=. "${PYTHON:-python3}" -m pytest -m "gpu or gpu_2 or gpu_4 or gpu_8" "$@"
