#!/usr/bin/env bash
# Compiles the CUDA sources with the headers and the assembler of CUDA 12, by clang, and looks
# whether its run-time library has all that they call. No GPU, and no nvcc 12, is needed.
#
#     tools/cuda_12_check.sh [clang++] [version of nvidia-cuda-runtime-cu12 ...]
set -euo pipefail
cd "$(dirname "$0")/.."
clang=${1:-clang++}
shift || true
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(12.1.105 12.5.82)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for version in "${versions[@]}"; do
  cuda=$work/$version
  python3 -m pip download -q --no-deps -d "$cuda" \
    "nvidia-cuda-nvcc-cu12==$version" "nvidia-cuda-runtime-cu12==$version"
  for wheel in "$cuda"/*.whl; do python3 -m zipfile -e "$wheel" "$cuda"; done
  cp -r "$cuda"/nvidia/cuda_runtime/. "$cuda"/nvidia/cuda_nvcc/. "$cuda"
  chmod +x "$cuda/bin/ptxas"
  touch "$cuda/include/curand_mtgp32_kernel.h"  # clang includes it; nothing here uses it
  flags=(-x cuda "--cuda-path=$cuda" -std=c++17 -O3 -DNDEBUG -fPIC -ffp-contract=off
    -fgpu-flush-denormals-to-zero -I. -w)
  for source in custom_ops/core/gpu/*.cu; do
    for architecture in sm_70 sm_90; do
      "$clang" "${flags[@]}" "--cuda-gpu-arch=$architecture" --cuda-device-only \
        -c "$source" -o "$work/code.cubin"
    done
    "$clang" "${flags[@]}" --cuda-gpu-arch=sm_90 --cuda-host-only -c "$source" -o "$work/host.o"
    nm -u "$work/host.o" | awk '{print $2}' | grep -E '^(__)?cuda' >> "$work/$version.called"
  done
  nm -D --defined-only "$cuda"/lib/libcudart.so.12 | awk '{print $3}' | sed 's/@.*//' |
    sort -u > "$work/defined"
  missing=$(sort -u "$work/$version.called" | comm -23 - "$work/defined")
  if [ -n "$missing" ]; then
    echo "CUDA $version has no $missing" >&2
    exit 1
  fi
  echo "CUDA $version: $(ls custom_ops/core/gpu/*.cu | wc -l) sources compile for sm_70 and sm_90," \
    "and all $(sort -u "$work/$version.called" | wc -l) functions they call are there"
done
