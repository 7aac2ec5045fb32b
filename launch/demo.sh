#!/usr/bin/env bash
# The main job, from nothing: 4 ranks answer questions over long prompts, cache sharded 4 ways and not at all.
set -euo pipefail
. "$(dirname "$0")/setup.sh" '[serve]'
exec python examples/needle/demo.py "$@"
