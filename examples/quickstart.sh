#!/usr/bin/env bash
# Trains a small CNN on two worker processes of this machine (dense, in float16, and with CodedGMC)
# and compares: ./examples/quickstart.sh [--out DIR] [--epochs N] [--seed N]
# Installs what it needs into .venv first. PYTHON chooses the interpreter.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/tools/setup_venv.sh" examples </dev/null
# The example is about the exchange: quiet TensorFlow, and the CPU even where there is a GPU.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:--1}
exec "$root/.venv/bin/python" "$root/examples/quickstart.py" "$@" </dev/null
