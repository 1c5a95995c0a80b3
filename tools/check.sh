#!/usr/bin/env bash
# The checks of `make check`: $1 is the environment's bin folder, the rest are the source folders.
# All run, even after one failed, so that one round shows everything.
set -u
bin=$1
shift
failed=()

step() {
  local name=$1 began=$SECONDS
  shift
  if "$@"; then echo "-- $name: ok ($((SECONDS - began)) s)"; else failed+=("$name"); echo "-- $name: FAILED"; fi
}

step "ruff check" "$bin/ruff" check --quiet "$@"
step "ruff format" "$bin/ruff" format --check --quiet "$@"
step "generated code" "$bin/python" protos/generate.py --check
step "mypy" "$bin/mypy" "$@"
step "tests" "$bin/python" -m pytest tests/architecture tests/scheduler tests/sdk -q -n 2 --dist loadfile
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
