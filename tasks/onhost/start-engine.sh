#!/bin/sh
# Starts the engine under any supervisor:  start-engine.sh PROGRAM [ARG...]
#   - marks the start in the log, so that one start can be told from another
#   - ends what a crash left of the start before (RACKWRIGHT_GROUP: a file that holds its process group)
#   - removes the shared memory that killed engines of its user left in /dev/shm: it is memory that nobody uses
#   - waits until the GPUs have the memory that the engine will ask for (RACKWRIGHT_GPU_FREE: that share of
#     it, for at most RACKWRIGHT_GPU_WAIT seconds); skipped where there is no nvidia-smi
#   - puts the API key into the environment, never into argv, unit or log: it is systemd's credential
#     "api-key" where there is one, else the file RACKWRIGHT_KEY_FILE; with RACKWRIGHT_KEY=required there is no
#     start without one
#   - raises its limit of open files, as far as it may
#   - drops the variables in RACKWRIGHT_UNSET
# start-engine.sh --tidy-shm UID     only removes such memory, that of another user too where it may
set -eu

# Only what Python's multiprocessing makes and names (multiprocessing/shared_memory.py, synchronize.py), older
# than a minute, of user $1, neither mapped nor open in any process that can be seen (proc(5)). A process of
# that user that cannot be looked into may use any of it: then all of it stays.
tidy_shm() {
    hex='[0-9a-f][0-9a-f][0-9a-f][0-9a-f]' any='[a-z0-9_][a-z0-9_][a-z0-9_][a-z0-9_]'
    old=$(find /dev/shm -maxdepth 1 -type f -user "$1" -mmin +1 \
        \( -name "psm_$hex$hex" -o -name "sem.mp-$any$any" \) 2>/dev/null) || :
    [ -n "$old" ] || return 0
    for process in $(find /proc -maxdepth 1 -name '[0-9]*' -user "$1" 2>/dev/null); do
        if { true <"$process/maps"; } 2>/dev/null; then continue; fi
        line=$(cat "$process/stat" 2>/dev/null) || continue
        set -- "$1" ${line##*) }
        # the dead and the kernel's own threads (children of 2) have no memory, and init has none of an engine's
        [ "$2" = Z ] || [ "$3" = 2 ] || [ "$process" = /proc/2 ] || [ "$process" = /proc/1 ] || return 0
    done
    used=$({ cat /proc/[0-9]*/maps; ls -l /proc/[0-9]*/fd; } 2>/dev/null \
        | grep -o '/dev/shm/[A-Za-z0-9_.-]*' | sort -u) || :
    count=0
    for file in $old; do
        if printf '%s\n' "$used" | grep -qxF "$file"; then continue; fi
        if rm -f "$file" 2>/dev/null; then count=$((count + 1)); fi
    done
    [ $count = 0 ] || echo "rackwright: removed $count files in /dev/shm that killed processes left"
}

if [ "$1" = --tidy-shm ]; then
    tidy_shm "$2"
    exit 0
fi
echo "rackwright: start $(date +%s)"

# Of all processes of a group, those that still live: their ids (field 5 of stat is the group, proc(5)).
group_members() {
    for stat in /proc/[0-9]*/stat; do
        line=$(cat "$stat" 2>/dev/null) || continue
        pid=${stat#/proc/}
        set -- ${line##*) }
        if [ "$3" = "$group" ] && [ "$1" != Z ]; then printf '%s ' "${pid%/stat}"; fi
    done
}

# Of this boot. A container that starts again keeps its machine's boot id and counts processes from 1 anew:
# there the time at which its first process started makes the difference (field 22 of stat).
boot_now() {
    line=$(cat /proc/1/stat 2>/dev/null) || line=''
    set -- ${line##*) }
    echo "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo unknown)/${20:-0}"
}

if [ -n "${RACKWRIGHT_GROUP:-}" ]; then
    group='' boot='' now=$(boot_now)
    [ ! -f "$RACKWRIGHT_GROUP" ] || read -r group boot <"$RACKWRIGHT_GROUP" || :
    # A number is not given to a new process while a group of it lives; a leader of that number is a stranger.
    if [ -n "$group" ] && [ "$boot" = "$now" ] && [ "$group" != "$$" ] && [ ! -e "/proc/$group" ]; then
        left=$(group_members)
        if [ -n "$left" ]; then
            echo "rackwright: ending what the last start left: $left"
            kill -KILL $left 2>/dev/null || :
        fi
    fi
    { echo "$$ $now" >"$RACKWRIGHT_GROUP"; } 2>/dev/null || echo "rackwright: cannot write $RACKWRIGHT_GROUP"
fi

tidy_shm "$(id -u)"

gpus_are_free() {
    ids=${CUDA_VISIBLE_DEVICES:-}
    case $ids in '' | *[!0-9,]*) ids='' ;; esac
    # A driver that does not answer is the engine's to report, not ours to wait for.
    used=$(timeout 20 nvidia-smi ${ids:+-i "$ids"} --query-gpu=memory.free,memory.total \
        --format=csv,noheader,nounits 2>/dev/null) || return 0
    printf '%s\n' "$used" | awk -F, -v share="$RACKWRIGHT_GPU_FREE" \
        '$1 + 0 > 0 && $2 + 0 > 0 && $1 < share * $2 { held = 1 } END { exit held }'
}

if [ -n "${RACKWRIGHT_GPU_FREE:-}" ] && command -v nvidia-smi >/dev/null 2>&1; then
    waited=0
    while ! gpus_are_free; do
        if [ $waited -ge "${RACKWRIGHT_GPU_WAIT:-90}" ]; then
            echo "rackwright: GPU memory is still held after $waited s; starting all the same"
            break
        fi
        [ $waited != 0 ] || echo "rackwright: waiting for GPU memory"
        sleep 1
        waited=$((waited + 1))
    done
fi

# before the key is there: that one stays, whatever is named
for name in ${RACKWRIGHT_UNSET:-}; do unset "$name"; done
key=${CREDENTIALS_DIRECTORY:+$CREDENTIALS_DIRECTORY/api-key}
[ -n "$key" ] && [ -r "$key" ] || key=${RACKWRIGHT_KEY_FILE:-}
if [ -n "$key" ]; then
    VLLM_API_KEY=$(cat "$key")
    [ -n "$VLLM_API_KEY" ] || { echo "rackwright: the key file $key is empty" >&2; exit 1; }
    export VLLM_API_KEY
elif [ -n "${RACKWRIGHT_KEY:-}" ]; then
    echo "rackwright: no key was handed over, and the engine is not started without one" >&2
    exit 1
fi
# vLLM asks for 65535 (vllm/utils/system_utils.py); systemd's unit says so, other supervisors leave it low
[ "$(ulimit -Sn)" = unlimited ] || [ "$(ulimit -Sn)" -ge 65536 ] \
    || ulimit -Sn 65536 2>/dev/null || ulimit -Sn "$(ulimit -Hn)" 2>/dev/null || :
unset RACKWRIGHT_KEY RACKWRIGHT_KEY_FILE RACKWRIGHT_UNSET RACKWRIGHT_GROUP RACKWRIGHT_GPU_FREE RACKWRIGHT_GPU_WAIT
exec "$@"
