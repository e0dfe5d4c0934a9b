#!/usr/bin/env bash
# Makes .venv in the project root if there is none, and installs the project into it with the extras
# named as arguments: tools/setup_venv.sh examples test
#
# A later call with nothing changed returns at once: a stamp file in .venv holds a hash of what the
# installation depends on. PYTHON chooses the interpreter that makes the environment, and TF_PACKAGE the
# package that TensorFlow comes as, such as tensorflow-cpu. A TensorFlow that is in .venv stays.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=$root/.venv
extras=$(printf '%s\n' "$@" | sort | paste -sd, -)
python=${PYTHON:-python3}
tensorflow=${TF_PACKAGE:-tensorflow}

die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

[ "$(uname -s)" = Linux ] || die "tf_redsync needs Linux. This is $(uname -s)."

make_venv() {
  command -v "$python" >/dev/null || die "\`$python\` not found. Install Python 3.10 to 3.13 (Debian," \
    "Ubuntu: apt-get install python3 python3-venv) or name an interpreter: PYTHON=/path/to/python3."
  "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    die "$("$python" --version) is not supported: TensorFlow needs Python 3.10 to 3.13." \
      "Name another interpreter: PYTHON=python3.12 $0"
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$("$python" --version) cannot make virtual environments." \
      "Debian, Ubuntu: apt-get install python3-venv (or python3.X-venv for another version)."
  echo "setup: making .venv with $("$python" --version)"
  # Complete or absent: a half-made environment would be taken for a good one by the next call.
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    die "\`$python -m venv .venv\` failed (see above)."
  fi
}

# The environment is for this machine. Without a GPU, kernels for one can only be compiled, for one
# architecture as well as for five; newer GPUs can run them all the same.
if [ -z "${REDSYNC_CUDA_ARCHITECTURES:-}" ] && ! nvidia-smi -L >/dev/null 2>&1; then
  export REDSYNC_CUDA_ARCHITECTURES=75
fi

# Everything the installation depends on: change any of it and the next call installs again.
fingerprint() {
  {
    echo "$extras"
    "$venv/bin/python" --version
    command -v "${CXX:-g++}" || true
    # GPU kernels come and go with the CUDA compiler.
    echo "${TF_REDSYNC_CUDA:-}" "${REDSYNC_CUDA_ARCHITECTURES:-}" \
      "$(PATH="${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin" command -v nvcc || true)"
    # One TensorFlow's library does not load under another.
    ls -d "$venv"/lib/python*/site-packages/tensorflow[-_]*.dist-info 2>/dev/null | xargs -rn1 basename
    find pyproject.toml setup.py custom_ops -type f \
      \( -name '*.py' -o -name '*.bzl' -o -name '*.toml' -o -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) \
      -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

# Most of the C++ needs no TensorFlow, and is compiled while pip fetches that. What fails here fails again
# in the build below, which reports it.
core=
trap '[ -z "$core" ] || kill "$core" 2>/dev/null || true' EXIT
compile_core() {
  nice -n 10 "$python" custom_ops/build_library.py <<<'{"kind": "core"}' >/dev/null 2>&1 &
  core=$!
}

if [ ! -x "$venv/bin/python" ]; then
  make_venv
  compile_core
fi
stamp=$venv/.installed-${extras//,/-}
native=$(find tf_redsync/ops -name '*.so' -print -quit 2>/dev/null || true)
wanted=$(fingerprint)

if [ "$(sed -n 1p "$stamp" 2>/dev/null)" = "$wanted" ]; then
  backend=$(sed -n 2p "$stamp")
  if [ "$backend" != native ] || [ -n "$native" ]; then
    echo "setup: .venv is up to date (ops: $backend)"
    exit 0
  fi
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check)
started=$SECONDS
log=$venv/install.log
step() {
  echo "setup: $1"
  shift
  "$@" >>"$log" 2>&1 || {
    tail -n 40 "$log" >&2
    die "failed: $*" "The whole output is in $log"
  }
}

has() {
  "$venv/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"
}

: >"$log"
# Of the many modules of TensorFlow, SciPy and others few are ever imported: Python compiles those when
# they are, first at the end of this script. With this variable, every later start would do it again.
unset PYTHONDONTWRITEBYTECODE
packages=(--no-compile 'setuptools>=70.1')
has tensorflow || packages+=("$tensorflow>=2.16,<2.22")
step "installing TensorFlow (a minute or more the first time)" "${pip[@]}" install "${packages[@]}"

build() {
  while [ -n "$core" ] && kill -0 "$core" 2>/dev/null; do sleep 0.1; done
  "$venv/bin/python" setup.py build_ext --inplace
}
# Compiles on the cores that pip leaves idle.
build >"$log.build" 2>&1 &
building=$!
if ! has tf_keras && [ "$extras" != quickstart ]; then
  # It fits one version of TensorFlow, and would bring the package `tensorflow`.
  version=$("$venv/bin/python" -c 'import tensorflow as tf; print(tf.__version__)' 2>>"$log") ||
    die "TensorFlow cannot be imported; see $log"
  step "installing tf_keras" "${pip[@]}" install --no-compile --no-deps "tf_keras==${version%.*}.*"
fi
# Without isolation, which would download setuptools once more.
step "installing tf_redsync[$extras]" \
  "${pip[@]}" install --no-build-isolation --no-compile --editable ".[$extras]"
built=0
wait "$building" || built=$?
cat "$log.build" >>"$log"
rm "$log.build"
step "building the native library" test "$built" = 0

first_import='
import importlib
for name in ("sklearn.datasets", "matplotlib.pyplot", "tf_keras", "tensorflow_addons"):
    try:
        importlib.import_module(name)
    except Exception:  # of another extra, or it does not fit this TensorFlow
        pass
import tf_redsync.strategy
print(tf_redsync.ops.backend())
'
backend=$(env -u TF_REDSYNC_BACKEND TF_CPP_MIN_LOG_LEVEL=2 CUDA_VISIBLE_DEVICES=-1 "$venv/bin/python" -c \
  "$first_import" 2>>"$log" | tail -n 1) || true
[ -n "$backend" ] || die "tf_redsync was installed but cannot be imported; see $log"
if [ "$backend" != native ]; then
  printf 'setup: %s\n' "NO NATIVE LIBRARY: tf_redsync runs on its pure-TensorFlow ops, which are slower." \
    "$(grep -m1 'NATIVE LIBRARY IS NOT BUILT' "$log" | sed 's/^ *//')" \
    "With a C++ compiler (Debian, Ubuntu: apt-get install g++) run this again." \
    "What the build said is in $log" >&2
fi
printf '%s\n' "$(fingerprint)" "$backend" >"$stamp"
echo "setup: done in $((SECONDS - started)) s (ops: $backend)"
