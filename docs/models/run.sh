#!/usr/bin/env bash
# Checks the models with spin: every rule must hold ("holds": errors: 0), every broken rule must be found ("found").
#
#     docs/models/run.sh            all, one line each; exit code 1 if any line is not as it should be
#     docs/models/run.sh lease ...  only these models or runs
#     docs/models/run.sh --list     names of the runs
#     KEEP=dir docs/models/run.sh handover-not-closed     leaves the trail in dir: cd dir && spin -t -p DEFINES model.pml
#
# Needs spin and gcc. Builds in a temporary directory. About half a minute on one core, less than 0.7 GB of memory.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# run | model | ltl formula | safety or fair (liveness under weak fairness) | holds or found | defines
runs() {
    cat <<'TABLE'
lease|lease|one_gate|safety|holds|
lease-no-drift|lease|one_gate|safety|found|-DNO_DRIFT
lease-no-margin|lease|one_gate|safety|found|-DNO_MARGIN
lease-renew-from-reply|lease|one_gate|safety|found|-DRENEW_FROM_REPLY
lease-renew-unguarded|lease|one_gate|safety|found|-DRENEW_UNGUARDED
lease-unknown-as-success|lease|one_gate|safety|found|-DUNKNOWN_AS_SUCCESS
lease-fresh-revision|lease|one_gate|safety|found|-DFRESH_REVISION
lease-take-unrevised|lease|one_gate|safety|found|-DTAKE_UNREVISED
lease-take-unknown-as-success|lease|one_gate|safety|found|-DTAKE_UNKNOWN_AS_SUCCESS
lease-unreadable-unguarded|lease|one_gate|safety|found|-DUNREADABLE_UNGUARDED
restart|restart|one_gate|safety|holds|
restart-settles|restart|settles|fair|holds|-DSETTLES -DALONE
restart-no-drift|restart|one_gate|safety|found|-DNO_DRIFT
restart-no-epoch-bump|restart|one_gate|safety|found|-DNO_EPOCH_BUMP
restart-no-stillness|restart|one_gate|safety|found|-DNO_STILLNESS
restart-no-heartbeat-compare|restart|one_gate|safety|found|-DNO_HEARTBEAT_COMPARE
restart-read-back-any-epoch|restart|one_gate|safety|found|-DREAD_BACK_ANY_EPOCH
restart-refused-join-repeated|restart|settles|fair|found|-DSETTLES -DALONE -DREFUSED_JOIN_REPEATED
outage|outage|spared|safety|holds|
outage-no-grace|outage|spared|safety|found|-DNO_GRACE
outage-grace-without-lateness|outage|spared|safety|found|-DGRACE_WITHOUT_LATENESS
outage-three-periods|outage|spared|safety|found|-DTTL_THREE_PERIODS
handover|handover|one_gate|safety|holds|-DMAX_HANDS=2
handover-opens|handover|opens|fair|holds|
handover-not-closed|handover|one_gate|safety|found|-DNOT_CLOSED
handover-unknown-as-failure|handover|one_gate|safety|found|-DUNKNOWN_AS_FAILURE
handover-unknown-as-success|handover|opens|fair|found|-DUNKNOWN_AS_SUCCESS
handover-not-settled|handover|opens|fair|found|-DNOT_SETTLED
handover-refused-settles|handover|one_gate|safety|found|-DREFUSED_SETTLES
handover-unrevised|handover|one_gate|safety|found|-DHAND_UNREVISED
handover-lapse-reopens|handover|one_gate|safety|found|-DLAPSE_REOPENS -DMAX_UNKNOWN=1
isolation|handover|one_gate|safety|holds|-DISOLATION -DMAX_HANDS=0 -DMAX_LAPSES=0
isolation-opens|handover|opens|fair|holds|-DISOLATION -DMAX_HANDS=0 -DMAX_LAPSES=0 -DMAX_UNKNOWN=1
isolation-alone-never-takes|handover|opens|fair|found|-DISOLATION -DMAX_HANDS=0 -DMAX_LAPSES=0 -DALONE_NEVER_TAKES
TABLE
}

if [ "${1:-}" = --list ]; then
    runs | cut -d'|' -f1
    exit 0
fi
for tool in spin gcc; do
    command -v "$tool" >/dev/null || { echo "$tool is not installed (scripts/system_packages.sh installs spin)"; exit 2; }
done

wanted() { # run and model against the arguments
    local name
    [ "${#names[@]}" -eq 0 ] && return 0
    for name in "${names[@]}"; do
        if [ "$name" = "$1" ] || [ "$name" = "$2" ]; then return 0; fi
    done
    return 1
}

work="${KEEP:-$(mktemp -d)}"
mkdir -p "$work"
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
names=("$@")
failed=0 count=0
while IFS='|' read -r run model formula mode expected defines; do
    wanted "$run" "$model" || continue
    count=$((count + 1))
    started="$(date +%s%N)"
    read -ra defined <<<"$defines"
    flags=(-DSAFETY -DNOFAIR -DCOLLAPSE)
    search=()
    if [ "$mode" = fair ]; then
        flags=(-DNOREDUCE -DNFAIR=3 -DCOLLAPSE)
        search=(-a -f)
    fi
    level=-O2 # what is found is found at once; compiling is what takes time
    [ "$expected" = holds ] || level=-O0
    cp "$here/$model.pml" "$work/"
    if ! (cd "$work" && rm -f pan "$model.pml.trail" && spin -a "${defined[@]}" "$model.pml" && gcc "$level" "${flags[@]}" -w -o pan pan.c &&
        ./pan -m1000000 -N "$formula" "${search[@]}") >"$work/log" 2>&1; then
        echo "FAIL $run: did not run: $(tail -n 1 "$work/log")"
        failed=1
        continue
    fi
    verdict=unclear
    if grep -q 'errors: 0$' "$work/log"; then
        grep -Eq 'depth too small|not completed|out of memory' "$work/log" || verdict=holds
    elif grep -Eq 'assertion violated|acceptance cycle' "$work/log" && ! grep -q 'invalid array index' "$work/log"; then
        verdict=found
    fi
    states="$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' "$work/log")"
    elapsed="$((($(date +%s%N) - started) / 100000000))"
    mark=ok
    [ "$verdict" = "$expected" ] || { mark=FAIL failed=1; }
    printf '%-4s %-30s %-8s %9s states %3d.%d s\n' "$mark" "$run" "$verdict" "$states" $((elapsed / 10)) $((elapsed % 10))
done < <(runs)
if [ "$count" -eq 0 ]; then
    echo "no such run: $* (see --list)"
    exit 2
fi
exit "$failed"
