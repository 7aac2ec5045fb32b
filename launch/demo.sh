#!/usr/bin/env bash
# The main job, from nothing: 4 ranks answer questions over long prompts, cache sharded 4 ways and not at all; then a chat over HTTP.
set -euo pipefail
. "$(dirname "$0")/setup.sh" '[serve,structured]'
pip install --quiet --disable-pip-version-check --constraint launch/constraints.txt openai
python examples/needle/demo.py "$@"
exec python examples/chat/talk.py
