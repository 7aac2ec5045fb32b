#!/usr/bin/env bash
# Run the tests that need GPUs, with the Python that runs this (torch for CUDA installed); those that want more GPUs than there are skip.
#   launch/test_gpu.sh [gpu|gpu_2|gpu_4|gpu_8|engines_gpu] [--part K/N] [--record | --again] [arguments of pytest]
#   one part, by the GPUs that its tests need, or of the plug-ins inside the engines that are installed; without it all parts but that one
#   --record writes what ran into tested_gpus.json, from which write_support.py makes docs/support.md;
#   --again runs the tests that failed in the record of the same sources, and writes how they end now
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
parts="gpu gpu_2 gpu_4 gpu_8"
case "${1:-}" in gpu | gpu_2 | gpu_4 | gpu_8 | engines_gpu) parts=$1 && shift ;; esac
status=0
for part in $parts; do
  "${PYTHON:-python3}" launch/run_tests.py "$part" "$@" || status=$?
done
exit $status
