#!/usr/bin/env bash
# Brings the system tools that some tests drive: fio (disk pressure during failover), iperf3 (reference for the wire)
# and spin (checks docs/models).
# Does nothing when they are there. Never fails: a test that misses its tool says so itself.
set -euo pipefail

missing=()
for tool in fio iperf3 spin; do
    command -v "$tool" >/dev/null 2>&1 || missing+=("$tool")
done
[ "${#missing[@]}" -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "system packages: missing ${missing[*]} (install them with your package manager; tests that need them are skipped)"
    exit 0
fi
echo "system packages: installing ${missing[*]}..."
export DEBIAN_FRONTEND=noninteractive
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
# A fresh container has no package lists, so the first try may fail for that reason alone.
if apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1; then exit 0; fi
if apt-get update >"$log" 2>&1 && apt-get install -y --no-install-recommends "${missing[@]}" >>"$log" 2>&1; then exit 0; fi
echo "system packages: could not install ${missing[*]} ($(tail -n 1 "$log")); tests that need them are skipped"
