#!/usr/bin/env bash
# `generate` over several hosts: the same line on each of them, in any order. One process of torchrun (an agent) a host starts its ranks.
#   NODES=2 RANKS=8 HEAD=node1 launch/torchrun_nodes.sh MODEL -tp 16 -dcp 16 --prompt "..."
set -euo pipefail
# Change: hosts; ranks (GPUs) of each; the host where the agents meet, by a name or address that all of them reach; a port free there.
nodes=${NODES:-2} ranks=${RANKS:-8} head=${HEAD:?set HEAD to the first host\'s name or address} port=${PORT:-29400}
# Where host names do not resolve to the network in question: this host's address there, in LOCAL_ADDR (then HEAD is the first host's).
agent=()
if [ -n "${LOCAL_ADDR:-}" ]; then
  is_head=0
  if [ "$LOCAL_ADDR" = "$head" ]; then is_head=1; fi
  agent=(--local-addr "$LOCAL_ADDR" --rdzv-conf "is_host=$is_head")
fi
# On hosts with several networks: the one between the GPUs.
#   export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-$root/.venv/bin/python}" -m torch.distributed.run \
  --nnodes "$nodes" --nproc-per-node "$ranks" --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "${JOB:-dcpmla}" \
  --max-restarts "${RESTARTS:-3}" "${agent[@]}" -m dcpmla generate "$@"
