#!/usr/bin/env bash
# Compare this package's engine with vLLM's, both with host memory for cached blocks, on one GPU:
#   benchmarks/offload_engines.sh KIT OUT [PART ...]
# KIT has e2e.py, which runs either engine over one load with one driver, and vLLM's files. The load is conversations whose contexts are together
# three times the GPU's cache. Parts are jobs, in this order unless named: vllm, dcpmla, dcpmla_alone, vllm_alone (alone: without host memory).
# A call ends within 560 s; a part that would not end in time is left out. Rows of each part are in OUT as soon as it ends.
set -uo pipefail
kit=$(realpath "$1") out=$(mkdir -p "$2" && realpath "$2") python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
shift 2
parts=("$@"); [ $# -gt 0 ] || parts=(vllm dcpmla dcpmla_alone vllm_alone)
export OUT=$out DCPMLA=$PWD PYTHONUNBUFFERED=1 E2E_DEADLINE=$(($(date +%s) + 545))
export VLLM_KIMI_K3_GEMM_AR=0 # vLLM 0.33 prepares that kernel by default; this GPU has none

# One GPU's share of DeepSeek-V3 under -tp 8: 20 layers, and a latent of 576 numbers in bfloat16 for each token.
model=v3slice token_bytes=$((20 * 576 * 2))
conversations=${CONVERSATIONS:-24} turns=4 first=${FIRST:-16384} more=64 answer=64
tokens=$((conversations * (first + (turns - 1) * more + turns * answer)))
cache=$((tokens / 3 * token_bytes)) host=$((2 * tokens * token_bytes / 1024 ** 3 + 1)) # bytes; GiB

e2e() { "$python" "$kit/e2e.py" "$@"; }
measure() { # ENGINE TAG LIMIT TIERS
  local options="{\"kv_cache_memory_bytes\": $cache$4}"
  e2e run --engine "$1" --model $model --prefix-caching --load c --conversations "$conversations" --turns $turns --first "$first" --more $more \
    --answer $answer --graph-sizes listed --tag "$2" --limit "$3" "--$1-json" "$options"
}

{ [ -d "${E2E_HOME:-/tmp/e2e_home}/tree" ] || e2e unpack; } & unpacking=$!
[ -f /dev/shm/e2e/$model/config.json ] || [ -f /tmp/e2e_models/$model/config.json ] || timeout 150 "$python" "$kit/e2e.py" make --model $model
wait "$unpacking"
for part in "${parts[@]}"; do
  case $part in
    vllm | dcpmla) measure "$part" host 240 ", \"kv_offloading_size\": $host" ;;
    vllm_alone | dcpmla_alone) measure "${part%_alone}" "" 240 "" ;;
    *) echo "no part $part: vllm, dcpmla, dcpmla_alone, vllm_alone" >&2; exit 2 ;;
  esac
done
"$python" benchmarks/engines.py "$out/rows.jsonl" --json "$out/offload_engines.json"
