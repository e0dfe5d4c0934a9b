#!/usr/bin/env bash
# Lint, type check, C++ format, then every test. Arguments go to pytest: tests/run.sh -k redsync
# Runs all stages whatever the earlier ones say; pytest comes last, and its summary line closes the
# output. The exit status is not 0 if any stage failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
tools/setup_venv.sh addons examples test </dev/null || exit 1
bin=$PWD/.venv/bin

failed=()
stage() {
  local name=$1
  shift
  echo "== $name"
  "$@" </dev/null || failed+=("$name")
}

cpp_format() {
  local files
  mapfile -t files < <(find custom_ops tests -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
  [ ${#files[@]} -gt 0 ] || { echo "no C++ files found"; return 1; }
  "$bin/clang-format" --dry-run -Werror "${files[@]}" && echo "${#files[@]} files"
}

stage "ruff check" "$bin/ruff" check .
stage "ruff format" "$bin/ruff" format --check .
stage "mypy" "$bin/mypy"
stage "clang-format" cpp_format

status=0
if [ ${#failed[@]} -gt 0 ]; then
  status=1
  printf '== FAILED before the tests: %s\n' "${failed[@]}"
fi
echo "== pytest"
"$bin/python" -m pytest "$@" </dev/null || status=$?
exit "$status"
