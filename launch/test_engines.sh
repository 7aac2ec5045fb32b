#!/usr/bin/env bash
# The plug-ins inside the engines that they are for, and load generators against the server: real ones, on CPUs. Each engine's Python is unpacked from its wheel into a cache outside the
# checkout (DCPMLA_ENGINES_CACHE); where it cannot be had, its tests are skipped, and the end says why.
set -euo pipefail
. "$(dirname "$0")/setup.sh" '[dev]'
exec python launch/run_tests.py engines "$@"
