#!/bin/sh
# Detached, resumable work on a host. Needs only POSIX sh, setsid or systemd-run, base64 and /proc.
#
#   job.sh start DIR KEY TAG [UNIT] start DIR/command.TAG (a script, which reads DIR/input.TAG) once for KEY;
#                                   prints one line
#   job.sh status DIR BYTES         prints state, the log's last BYTES and the result, as base64
#   job.sh cancel DIR [WHY]         end the job's whole process group; who watches it is told why
#
# State in DIR: starter (who starts it now), judging (somebody looks whether that one lives), key, command, boot,
# pid, start (of that pid, so that a reused pid is not taken for ours), init (the same of process 1), since (the
# host's uptime then), started, ended, rc, cancelled (why), log (stderr of the work), result (its stdout), input
# (its stdin), session (proxies).
# A job is done only when rc exists; rc is written last, by rename. The room for rc, ended and result is
# taken at the start, so that a job that fills the disk can still say so.
set -u

session='http_proxy https_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE AWS_CA_BUNDLE'

boot_id() { cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo unknown; }

# Field 22 of stat, counted after the last ')' because the name may hold spaces (proc(5)). Nothing for a zombie:
# where process 1 does not reap, it stays for ever.
start_of() { sed -n 's/.*) [^ZX] /- /p' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

uptime_now() { cut -d. -f1 /proc/uptime 2>/dev/null; }

# Whether the process BOOT PID START is still there.
lives() { [ $# = 3 ] && [ "$1" = "$(boot_id)" ] && [ "$(start_of "$2")" = "$3" ]; }

# Whether the leader BOOT PID was killed and its group works on. A container that starts again keeps its machine's
# boot id and counts processes anew: INIT is when its process 1 began.
orphaned() {
    [ $# = 3 ] && [ "$1" = "$(boot_id)" ] && [ "$3" = "$(start_of 1)" ] && [ -z "$(start_of "$2")" ] \
        && grep -qsE "\) [^ZX] [0-9]+ $2 " /proc/[0-9]*/stat
}

# shellcheck disable=SC2046  # three words
alive() { lives $(cat boot pid start 2>/dev/null) || orphaned $(cat boot pid init 2>/dev/null); }

state() {
    if [ -f rc ]; then echo done; elif alive; then echo running
    elif [ -f rc ]; then echo done # it ended between the two looks
    elif [ -f key ]; then echo dead; else echo absent; fi
}

case "$1" in
run)
    cd "$2" || exit 1
    # the start that was killed before this one wrote its pid may have been made anew
    if alive; then exit 0; fi
    # unrecorded work would run beside its successor
    { boot_id >boot && start_of $$ >start && start_of 1 >init && echo $$ >pid.new && mv pid.new pid; } || exit 1
    if [ -f session ]; then . ./session; rm -f session; fi
    # what the work makes, a service user must be able to read; the job's own state stays ours
    (umask 022 && exec sh ./command) <input 1<>result 2>>log
    code=$?
    date +%s 1<>ended
    printf '%-8s' $code 1<>rc.new
    sync rc.new 2>/dev/null
    mv rc.new rc
    ;;
start)
    dir=$2 key=$3 tag=$4 unit=${5:-}
    mkdir -p "$dir" && cd "$dir" || exit 1
    cannot_write() {
        echo "$dir cannot be written: $(df -P . | awk 'END { print $4 " kB are free on " $6 }')" >&2
        exit 1
    }
    # A start once begun is ended, also when nobody is left to read its answer: without a trap the shell would
    # die of that (SIGPIPE) with its lock in place. The handler is not inherited, so the job has none.
    trap : HUP INT PIPE TERM
    # The lock is a link that names its holder: two controllers at once start one job, and who was killed, or
    # has been stopped for two minutes, holds up nobody.
    me="$(boot_id) $$ $(start_of $$)"
    release() { [ "$(readlink "$dir/starter")" = "$me" ] && rm -f "$dir/starter"; }
    # The lock goes first: a signal that meets dash in its EXIT trap can end the trap (seen with 0.5.12).
    answer() { release; rm -f "command.$tag" "input.$tag"; trap - EXIT; echo "$1"; }
    trap 'release; rm -f "$dir/command.$tag" "$dir/input.$tag"' EXIT
    take() { # it may be let go of between the try and the look at whose it is
        for _ in 1 2 3 4 5; do
            why=$(LC_ALL=C ln -s "$me" starter 2>&1) && return 0
            [ ! -L starter ] || return 1
        done
        return 1
    }
    if ! take; then
        # One at a time judges and removes: what was found abandoned may be another's by the time it is removed.
        [ -z "$(find judging -maxdepth 0 -mmin +2 2>/dev/null)" ] || rmdir judging 2>/dev/null
        if ! mkdir judging 2>/dev/null; then echo busy; exit 0; fi
        holder=$(readlink starter)
        # shellcheck disable=SC2086  # three words
        if [ -n "$holder" ] && { ! lives $holder || [ -n "$(find starter -maxdepth 0 -mmin +2 2>/dev/null)" ]; }; then
            [ "$(readlink starter)" != "$holder" ] || rm -f starter
        fi
        take
        taken=$?
        rmdir judging
        if [ $taken != 0 ]; then
            case $why in *xists*) echo busy; exit 0 ;; esac
            echo "$why" >&2
            exit 1
        fi
    fi
    old=$(cat key 2>/dev/null)
    case $(state) in
    running)
        if [ "$old" = "$key" ]; then answer attached; else answer "other $old"; fi
        exit 0 ;;
    done)
        if [ "$old" = "$key" ] && [ "$(tr -d ' ' <rc)" = 0 ] && [ ! -f again ]; then answer done; exit 0; fi ;;
    esac
    # each controller's files have names of their own: one that is refused does not change another's job
    mv -f "command.$tag" command && mv -f "input.$tag" input || exit 1
    find . -type f \( -name 'command.*' -o -name 'input.*' \) -mmin +60 -exec rm -f {} + 2>/dev/null
    rm -f rc ended pid boot start init since again result cancelled
    [ -f log ] && mv -f log log.1
    : >log
    { printf '%8s' '' >rc.new && printf '%16s' '' >ended && printf '%65536s' '' >result; } 2>/dev/null || cannot_write
    printf %s "$key" 2>/dev/null >key || cannot_write
    date +%s >started
    uptime_now >since
    # a system unit would know nothing of the session's proxies and certificates
    for name in $session; do
        eval "value=\${$name-}"
        [ -z "$value" ] || printf "export %s='%s'\n" "$name" \
            "$(printf %s "$value" | tr -d '\n\r' | sed "s/'/'\\\\''/g")"
    done >session
    # A system unit outlives logout. A user's manager does not (without lingering), setsid does.
    if [ -n "$unit" ] && [ -d /run/systemd/system ] && [ "$(id -u)" = 0 ]; then
        as_unit() {
            systemd-run --quiet --collect --unit="$unit" --property=KillMode=control-group "$@" \
                /bin/sh "$0" run "$dir" >>log 2>&1
        }
        # a compiler killed for memory must not end the whole job: the job goes on with fewer (systemd >= 243)
        as_unit --property=OOMPolicy=continue || as_unit || { cat log >&2; exit 1; }
    elif command -v setsid >/dev/null 2>&1; then
        setsid nohup /bin/sh "$0" run "$dir" </dev/null >/dev/null 2>&1 &
    else
        nohup /bin/sh "$0" run "$dir" </dev/null >/dev/null 2>&1 &
    fi
    i=0
    while [ ! -f pid ] && [ ! -f rc ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i + 1)); done
    [ -f pid ] || { echo "did not start: $(tail -n 3 log)" >&2; exit 1; }
    answer started
    ;;
status)
    cd "$2" 2>/dev/null || { echo "state=absent"; exit 0; }
    s=$(state)
    echo "state=$s"
    echo "key=$(cat key 2>/dev/null)"
    echo "rc=$(tr -d ' ' 2>/dev/null <rc)"
    echo "started=$(cat started 2>/dev/null)"
    echo "ended=$(tr -d ' ' 2>/dev/null <ended)"
    echo "now=$(date +%s)"
    # a clock that is set meanwhile changes neither
    if [ "$s" = running ] && [ -s since ]; then echo "ran=$(($(uptime_now) - $(cat since)))"; fi
    [ ! -f cancelled ] || echo "cancelled=$(head -n 1 cancelled)"
    echo "log=$(tail -c "$3" log 2>/dev/null | base64 | tr -d '\n')"
    if [ "$s" = done ]; then echo "result=$(sed 's/ *$//' result 2>/dev/null | base64 | tr -d '\n')"; fi
    ;;
cancel)
    cd "$2" 2>/dev/null || exit 0
    alive || exit 0
    p=$(cat pid)
    echo "${3:-another run}" >cancelled
    # the session leader's group; systemd-run gives the leader a group of its own too
    kill -s TERM -- "-$p" 2>/dev/null || kill -s TERM "$p" 2>/dev/null
    # the leader ends at once, the program that it started may want a moment to end in order
    i=0
    while kill -s 0 -- "-$p" 2>/dev/null && [ $i -lt 50 ]; do sleep 0.2; i=$((i + 1)); done
    kill -s KILL -- "-$p" 2>/dev/null
    exit 0
    ;;
*)
    echo "usage: job.sh start|status|cancel DIR ..." >&2
    exit 2
    ;;
esac
