#!/usr/bin/env bash
# Run the tests that need GPUs, with the Python that runs this (torch for CUDA installed); those that want more GPUs than there are skip.
#   launch/test_gpu.sh [gpu|gpu_2|gpu_4|gpu_8] [arguments of pytest]: one part, by the GPUs that its tests need; all parts without it
#   `gpu -n 12`, several at a time, takes seven minutes on 16 cores: most of it is compilation, in one thread each
set -euo pipefail
cd "$(dirname "$0")/.."
part="gpu or gpu_2 or gpu_4 or gpu_8"
case "${1:-}" in gpu | gpu_2 | gpu_4 | gpu_8) part=$1 && shift ;; esac
exec env PYTHONPATH=. OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "${PYTHON:-python3}" -m pytest --ignore tests/serving -m "$part" "$@"
