#!/usr/bin/env bash
# Makes .venv with a Python that is new enough, or says in one line why not.
# usage: scripts/make_venv.sh PYTHON FOLDER
set -euo pipefail
python="$1"
folder="$2"

if ! command -v "$python" >/dev/null 2>&1; then
    echo "error: '$python' not found: EmberKV needs Python 3.11 or newer (choose one with: make PYTHON=python3.12 ...)" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: '$python' is $("$python" -V 2>&1): EmberKV needs Python 3.11 or newer (choose one with: make PYTHON=python3.12 ...)" >&2
    exit 2
fi
echo "creating $folder with $("$python" -V)..."
# Without --clear: over an existing environment this repairs what is missing and keeps what is installed.
"$python" -m venv "$folder"
