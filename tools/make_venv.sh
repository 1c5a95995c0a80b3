#!/usr/bin/env bash
# Makes the virtual environment $1, unless it works already, with the first Python >= 3.11 that can really make one.
# PYTHON=/path/to/python goes first. 3.11 is tried before newer ones: constraints.txt is tested with it.
set -u
target=${1:?usage: make_venv.sh FOLDER}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
works() { "$target/bin/python" -m pip --version >/dev/null 2>&1; }

# With the interpreter's own venv module, else with a virtualenv fetched by its pip.
attempt() {
  rm -rf "$target"
  "$1" -m venv "$target" >/dev/null 2>&1 && works && return 0
  rm -rf "$target"
  local extra
  extra=$(mktemp -d) || return 1
  if "$1" -m pip install --quiet --target "$extra" virtualenv >/dev/null 2>&1; then
    PYTHONPATH=$extra "$1" -m virtualenv --quiet "$target" >/dev/null 2>&1
  fi
  rm -rf "$extra"
  works
}

works && exit 0
for python in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 /usr/bin/python3.11 /usr/bin/python3; do
  recent "$python" || continue
  if attempt "$python"; then
    echo "made $target with $("$target/bin/python" -V) ($python)"
    exit 0
  fi
  echo "$python has neither venv nor pip; trying the next one" >&2
done
cat >&2 <<TEXT
No Python >= 3.11 here can make a virtual environment.
On Debian or Ubuntu: apt-get install python3 python3-venv. Elsewhere install Python 3.11 or newer.
Or name one: make PYTHON=/path/to/python3.11 ...
TEXT
rm -rf "$target"
exit 1
