#!/usr/bin/env bash
# Lint, type check, C++ format, the Bazel build if there is a bazel, and every test. Arguments go to pytest: tests/run.sh -k redsync
# TEST_PROCESSES (default 3) is the number of test processes side by side; 0 runs them in this one.
# Runs all stages whatever the earlier ones say; Bazel runs beside the others. The summary line of pytest
# closes the output. The exit status is not 0 if any stage failed.
# A run of everything notes what the native library was made of when all passed. Without arguments, Bazel and
# the tests of kernels (tests/kernels, tests/gpu) are left out while that is the same; --deep runs them always.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
tools/setup_venv.sh addons docs examples report test </dev/null || exit 1
bin=$PWD/.venv/bin
cache=${XDG_CACHE_HOME:-${HOME:-$PWD/build}/.cache}/tf_redsync
work=$(mktemp -d)
background=
trap '[ -z "$background" ] || kill -- -"$background" 2>/dev/null; rm -rf "$work"' EXIT

stage() {
  local name=$1
  shift
  echo "== $name"
  local started=$SECONDS
  "$@" </dev/null || echo "$name" >>"$work/failed"
  echo "== $name took $((SECONDS - started)) s"
}

cpp_format() {
  local files
  mapfile -t files < <(find custom_ops tests -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
  [ ${#files[@]} -gt 0 ] || { echo "no C++ files found"; return 1; }
  "$bin/clang-format" --dry-run -Werror "${files[@]}" && echo "${#files[@]} files"
}

# One command builds everything and runs the C++ tests. No server stays behind (--batch). CUDA for one
# architecture, and another one than in .venv. What Bazel has built in any clone it finds again by a hash of
# the sources; it never tidies up itself.
bazel_test() {
  [ ! -d "$cache/bazel" ] || find "$cache/bazel" -type f -mtime +30 -delete
  REDSYNC_CUDA_ARCHITECTURES=${REDSYNC_CUDA_ARCHITECTURES:-90} \
  PYTHON_BIN_PATH=$bin/python timeout --foreground --kill-after=10 900 nice bazel --batch \
    --output_user_root="$PWD/build/bazel-user" --output_base="$PWD/build/bazel" \
    test --disk_cache="$cache/bazel" --noshow_progress --color=no //... &&
    "$bin/python" tests/kernels/smoke.py build/bazel-bin/custom_ops/_redsync_ops.so
}

# A hash of what Bazel and the tests of kernels depend on: sources, tests, tools.
fingerprint() {
  {
    find custom_ops setup.py pyproject.toml BUILD WORKSPACE .bazelrc .bazelignore tools/build_defs \
      tools/native_rules tools/gpu_check.py tools/gpu_check.sh tf_redsync/ops tf_redsync/building \
      tf_redsync/codings tf_redsync/exchange tf_redsync/methods/common tf_redsync/methods/dense.py \
      tf_redsync/checks.py tf_redsync/config.py tf_redsync/outer.py benchmarks/selection tests/kernels \
      tests/gpu tests/oracle tests/__init__.py tests/compiling.py tests/conftest.py tests/deep.py \
      tests/loops.py tests/run.sh -type f ! -path '*/__pycache__/*' ! -name '*.so' -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum || return 1
    "$bin/python" -c 'import sys
from importlib.metadata import distributions
print(sys.version, sorted((d.name, d.version) for d in distributions()))' || return 1
    for tool in "${CXX:-g++}" bazel nvcc; do
      command -v "$tool" && "$tool" --version </dev/null
    done
    command -v nvidia-smi && nvidia-smi -L
    uname -rm
  } 2>/dev/null | sha256sum | cut -c1-32
}

# What passed the last time in the same state need not pass again.
left_out=()
record=
case $* in
  "" | --deep)
    if hash=$(fingerprint); then record=$cache/passed/$hash; else echo "== the sources have no hash"; fi ;;
esac
if [ $# -eq 0 ] && [ -n "$record" ] && [ -e "$record" ]; then
  left_out=(--ignore=tests/kernels --ignore=tests/gpu)
  echo "== bazel, tests/kernels, tests/gpu: LEFT OUT, they passed here on $(date -r "$record" '+%F %R')"
  echo "   with the same sources and tools; to run them: tests/run.sh --deep, or rm $record"
elif command -v bazel >/dev/null; then
  set -m  # a process group of its own, to end it as a whole
  stage "bazel" bazel_test >"$work/bazel" 2>&1 &
  background=$!
  set +m
else
  echo "== bazel: LEFT OUT, there is no bazel (Debian: apt-get install bazel-bootstrap)"
fi

stage "ruff check" "$bin/ruff" check .
stage "ruff format" "$bin/ruff" format --check .
stage "mypy" "$bin/mypy"
stage "clang-format" cpp_format
stage "codespell" "$bin/codespell"

status=0
colour=auto
[ ! -t 1 ] || colour=yes
echo "== pytest"
"$bin/python" -m pytest -n "${TEST_PROCESSES:-3}" --no-loadscope-reorder --durations=30 --durations-min=1 \
  --color=$colour "${left_out[@]}" "$@" </dev/null 2>&1 | tee "$work/pytest" || status=$?
if [ -n "$background" ]; then
  wait "$background" || echo "bazel: ended by a signal" >>"$work/failed"
  background=
  cat "$work/bazel"
fi
if [ -e "$work/failed" ]; then
  status=1
  sed 's/^/== FAILED beside the tests: /' "$work/failed"
fi
if [ $status -eq 0 ] && [ -n "$record" ]; then
  mkdir -p "${record%/*}" && touch "$record"
fi
tail -n 1 "$work/pytest"
exit "$status"
