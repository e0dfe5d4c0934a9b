#!/usr/bin/env bash
# Lint, type check, C++ format, the Bazel build if there is a bazel, then every test. Arguments go to pytest: tests/run.sh -k redsync
# TEST_PROCESSES (default 2) is the number of test processes side by side; 0 runs them in this one.
# Runs all stages whatever the earlier ones say; pytest comes last, and its summary line closes the
# output. The exit status is not 0 if any stage failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
tools/setup_venv.sh addons docs examples report test </dev/null || exit 1
bin=$PWD/.venv/bin

failed=()
stage() {
  local name=$1
  shift
  echo "== $name"
  local started=$SECONDS
  "$@" </dev/null || failed+=("$name")
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
  local cache=${XDG_CACHE_HOME:-${HOME:-$PWD/build}/.cache}/tf_redsync/bazel
  [ ! -d "$cache" ] || find "$cache" -type f -mtime +30 -delete
  REDSYNC_CUDA_ARCHITECTURES=${REDSYNC_CUDA_ARCHITECTURES:-90} \
  PYTHON_BIN_PATH=$bin/python timeout --kill-after=10 900 bazel --batch \
    --output_user_root="$PWD/build/bazel-user" --output_base="$PWD/build/bazel" \
    test --disk_cache="$cache" --noshow_progress --color=no //... &&
    "$bin/python" tests/kernels/smoke.py build/bazel-bin/custom_ops/_redsync_ops.so
}

# What reads the sources takes one processor; Bazel's analysis and its last source leave one idle.
lint() {
  stage "ruff check" "$bin/ruff" check .
  stage "ruff format" "$bin/ruff" format --check .
  stage "mypy" "$bin/mypy"
  stage "clang-format" cpp_format
  stage "codespell" "$bin/codespell"
  printf '%s\n' "${failed[@]:-}" >"$lint_folder/failed"
}
lint_folder=$(mktemp -d)
trap 'rm -rf "$lint_folder"' EXIT
lint >"$lint_folder/log" 2>&1 &
if command -v bazel >/dev/null; then
  stage "bazel" bazel_test
else
  echo "== bazel: LEFT OUT, there is no bazel (Debian: apt-get install bazel-bootstrap)"
fi
wait
cat "$lint_folder/log"
[ -f "$lint_folder/failed" ] || echo "the checks of the sources did not end" >"$lint_folder/failed"
while read -r name; do
  [ -z "$name" ] || failed+=("$name")
done <"$lint_folder/failed"

status=0
if [ ${#failed[@]} -gt 0 ]; then
  status=1
  printf '== FAILED before the tests: %s\n' "${failed[@]}"
fi
echo "== pytest"
"$bin/python" -m pytest -n "${TEST_PROCESSES:-2}" --no-loadscope-reorder "$@" </dev/null || status=$?
exit "$status"
