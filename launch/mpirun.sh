#!/usr/bin/env bash
# `generate` under mpirun, from one host: MPI starts the ranks, tells them who they are and where to meet; then torch takes over.
#   HOSTS=node1,node2 RANKS=8 launch/mpirun.sh MODEL -tp 16 -dcp 16 --prompt "..."
set -euo pipefail
# Change: the hosts (reached over ssh; inside Slurm, PBS or LSF the scheduler's way), ranks (GPUs) of each.
hosts=${HOSTS:-localhost} ranks=${RANKS:-8}
commas=${hosts//[^,]/}
num_ranks=$(((${#commas} + 1) * ranks))
# On hosts with several networks, or names that do not resolve (MASTER_ADDR: the first host's address); mpirun hands these on.
#   export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 HYDRA_IFACE=eth0 MASTER_ADDR=10.0.0.1
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# The mpirun must be of the MPI that mpi4py loads: extra `mpi` puts MPICH's beside Python. Intel MPI takes the same options, Open MPI
#   mpirun -n "$num_ranks" --host node1:8,node2:8 -x OMP_NUM_THREADS -x PYTHONPATH ...
exec "$(dirname "$python")/mpirun" -n "$num_ranks" -hosts "$hosts" -ppn "$ranks" "$python" -m dcpmla generate "$@"
