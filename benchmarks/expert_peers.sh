#!/usr/bin/env bash
# Brings the expert kernels that `python -m dcpmla bench experts --peers DEST` compares with ours, from public wheels.
#   benchmarks/expert_peers.sh DEST
# For timing side by side only: keep DEST out of every commit. Built for Python 3.12, torch 2.11.0+cu130, sm_90a; they
# compile their kernels on the GPU machine, by nvcc or Triton.
# DEST/deep_gemm.tar.xz  DeepGEMM, as vLLM vendors it, without debug symbols (vllm 0.33.0 wheel)
# DEST/vllm_moe.tar.xz   vLLM's Triton kernel and its tiles for H200s           (same wheel)
# DEST/humming.tar.xz    humming-kernels 0.1.19, and cuda-bindings where torch was installed without
set -euo pipefail
dest=${1:?usage: expert_peers.sh DEST}
mkdir -p "$dest"; dest=$(cd "$dest" && pwd)
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
get() { python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --abi cp312 --abi abi3 --abi none --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any -d "$tmp" "$1"; }
pack() { tar -C "$2" --owner=0 --group=0 --sort=name --mtime=2026-01-01 -cf - . | xz -T0 -6 >"$dest/$1.tar.xz.part"; mv "$dest/$1.tar.xz.part" "$dest/$1.tar.xz"; }
if [ ! -e "$dest/deep_gemm.tar.xz" ] || [ ! -e "$dest/vllm_moe.tar.xz" ]; then
  get vllm==0.33.0
  moe=vllm/model_executor/layers/fused_moe
  unzip -q "$tmp"/vllm-*.whl 'vllm/third_party/deep_gemm/*' "$moe/fused_moe.py" "$moe/configs/*NVIDIA_H200,dtype=fp8*" -d "$tmp"
  pack vllm_moe "$tmp/$moe"
  strip --strip-debug "$tmp"/vllm/third_party/deep_gemm/_C_extension*.so
  pack deep_gemm "$tmp/vllm/third_party"
fi
if [ ! -e "$dest/humming.tar.xz" ]; then
  for wheel in humming-kernels==0.1.19 cuda-bindings==13.0.3 cuda-pathfinder==1.3.4; do get "$wheel"; done
  mkdir "$tmp/humming"
  for wheel in "$tmp"/{humming,cuda}_*.whl; do unzip -q "$wheel" -d "$tmp/humming"; done
  pack humming "$tmp/humming"
fi
du -h "$dest"/*.tar.xz
