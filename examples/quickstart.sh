#!/usr/bin/env bash
# Trains a small CNN on two worker processes of this machine (dense, in float16, and with CodedGMC)
# and compares: ./examples/quickstart.sh [--out DIR] [--epochs N] [--seed N]
# Installs what it needs into .venv first. PYTHON chooses the interpreter. Without a GPU, TensorFlow comes
# as tensorflow-cpu, half as large, and the native library without GPU kernels; TF_PACKAGE=tensorflow and
# TF_REDSYNC_CUDA=1 choose otherwise.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if ! nvidia-smi -L >/dev/null 2>&1; then
  # There is no other wheel of tensorflow-cpu.
  [ "$(uname -m)" != x86_64 ] || export TF_PACKAGE=${TF_PACKAGE:-tensorflow-cpu}
  export TF_REDSYNC_CUDA=${TF_REDSYNC_CUDA:-0}
  [ -x "$root/.venv/bin/python" ] ||
    echo "quickstart: no GPU here: ${TF_PACKAGE:-tensorflow}, TF_REDSYNC_CUDA=$TF_REDSYNC_CUDA (set them to choose otherwise)"
fi
"$root/tools/setup_venv.sh" quickstart </dev/null
# The example is about the exchange: quiet TensorFlow, and the CPU even where there is a GPU.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:--1}
exec "$root/.venv/bin/python" "$root/examples/quickstart.py" "$@" </dev/null
