#!/bin/bash
# All that a machine with a GPU can tell of the CUDA core, in ten minutes; see tools/gpu_check.py.
# Results go to $OUT, or to the folder gpu_check. Needs nvcc, and a Python (PYTHON) with numpy and
# pytest.
cd "$(dirname "$0")/.." || exit 1
PYTHONPATH=$PWD exec "${PYTHON:-python3}" tools/gpu_check.py --out "${OUT:-gpu_check}" "$@"
