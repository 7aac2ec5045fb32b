#!/usr/bin/env bash
# Measure what is stated for eight GPUs, on one host that has them, in at most eight minutes:
#   benchmarks/eight_gpus.sh OUT [PEERS]     PEERS: vLLM's direct all-to-all, as `bench exchange --peers` takes it; NUM_GPUS=4 tries it on four
# Each part has a limit of its own. Its rows and its log are in OUT as soon as it ends, and the next one begins whatever became of it.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd) peers=${2:+--peers $(realpath "$2")} n=${NUM_GPUS:-8} python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
export PYTHONPATH=. OMP_NUM_THREADS=8
dcp=$(for size in 1 2 4 8; do [ $size -gt "$n" ] || printf '%s,' $size; done)
dcp=${dcp%,}

part() { # NAME LIMIT COMMAND: run it, and say how it ended
  local name=$1 limit=$2 begun=$SECONDS end
  timeout -k 5 "$limit" "${@:3}" > "$out/$name.log" 2>&1
  case $? in 0) end=done ;; 124 | 137) end="cut off" ;; *) end="FAILED, see $name.log" ;; esac
  echo "$name: $end after $((SECONDS - begun)) s"
}

measure() { # NAME LIMIT BENCHMARK OPTIONS: on all GPUs; no case begins in the last seconds
  part "$1" "$2" "$python" -m torch.distributed.run --standalone --nproc-per-node "$n" -m dcpmla bench "${@:3}" \
    --time-limit $(($2 - 15)) --json "$out/$1.json"
}

# DeepSeek-V3's sizes in fp8, as many layers as load in a minute: a config is all that random weights need.
"$python" - "$out/deepseek-v3" <<'EOF'
import json, sys
from pathlib import Path
from dcpmla.bench.geometries import config_of
sizes = {"num_hidden_layers": 8, "first_k_dense_replace": 1, "max_position_embeddings": 131072}
config = config_of("deepseek-v3", **sizes, eos_token_id=None, dtype="bfloat16")
config.quantization_config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
Path(sys.argv[1]).mkdir(exist_ok=True)
Path(sys.argv[1], "config.json").write_text(config.to_json_string(use_diff=False))
EOF
model=(--model "$out/deepseek-v3" --load-format dummy -tp "$n")

# shellcheck disable=SC2086 -- peers: none, or an option and its value
measure exchange 60 exchange --tokens 1,8,32,128,256 --heads 64,128 $peers
measure layer 75 layer -tp "$n" -dcp "$dcp" --dcp-comm-backend direct --batch 1,8,32,128 --context 4096,32768,131072,524288 --kv-cache-dtype bf16,fp8
measure sparse 25 sparse -tp "$n" -dcp "1,$n" --dcp-comm-backend direct --batch 1,32 --context 131072 --index-cache-dtype fp8
measure v4 30 layer --geometry deepseek-v4-flash -tp "$n" -dcp "1,$n" --dcp-comm-backend direct --batch 1,32 --context 131072
for size in 1 "$n"; do
  measure "step_dcp$size" 45 generate "${model[@]}" -dcp "$size" --batch 1,8,32,128 --input-len 1024 --output-len 40 --max-num-seqs 128
done
measure drafts 40 generate "${model[@]}" -dcp "$n" --batch 1,4 --input-len 8192 --output-len 128 --max-num-seqs 4 --speculative-method mtp --acceptance 0.8
part agreement 45 "$python" benchmarks/agreement.py --num-gpus "$n" --output "$out/agreement.json"
part tests 75 env PYTHON="$python" launch/test_gpu.sh "gpu_$n"
"$python" benchmarks/eight_gpus.py "$out" "$n"
for measured in exchange layer step_dcp1 "step_dcp$n"; do
  [ ! -e "$out/$measured.json" ] || "$python" -m dcpmla plan --model "$out/deepseek-v3" --measured "$out/$measured.json" | tail -1
done
