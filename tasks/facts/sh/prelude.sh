# Prelude of the probe: deadlines, bounds and clean text, for dash, bash and busybox alike.
#
# - A process in uninterruptible sleep (nvidia-smi on a dead GPU) cannot be killed, so nothing may wait for
#   it: a command writes into a pipe from an orphaned background group, and only the reader at the other
#   end, which can always be killed, is waited for.
# - dash waits for every process of a pipeline, also in `wait $!`; hence `( ... & ) | reader`.
# - Nothing is written on the host, so there are no temporary files: output passes through a variable.
# - Only printable ASCII leaves the host: a stray byte in command output can hang some controllers.
LC_ALL=C; LANG=C; LANGUAGE=; export LC_ALL LANG LANGUAGE
rw_path=$PATH
PATH=${PATH:-/usr/bin:/bin}:/usr/local/sbin:/usr/sbin:/sbin; export PATH
if timeout -k 1 5 sh -c : >/dev/null 2>&1; then rw_timeout=y; else rw_timeout=; fi
if setsid sh -c : >/dev/null 2>&1; then rw_setsid=y; else rw_setsid=; fi
kv() { printf '%s=%s\n' "$1" "$2"; }
has() { command -v "$1" >/dev/null 2>&1; }
# rw_kill_after SECONDS PID: kill PID and its group then; ends at once, with its sleep, on a TERM.
rw_kill_after() {
  trap 'kill -9 "$!" 2>/dev/null; exit 0' TERM
  sleep "$1" &
  wait "$!" && { kill -9 "-$2" 2>/dev/null || kill -9 "$2"; }
}
# t SECONDS COMMAND...: run a command under a deadline; status 124 when it ran out.
t() {
  rw_s=$1; shift
  if [ "$rw_timeout" ]; then
    timeout -k 1 "$rw_s" "$@"; rw_r=$?
  else
    if [ "$rw_setsid" ]; then setsid "$@" & else "$@" & fi
    rw_p=$!
    rw_kill_after "$rw_s" "$rw_p" >/dev/null 2>&1 & rw_w=$!
    wait "$rw_p" 2>/dev/null; rw_r=$?
    kill "$rw_w" 2>/dev/null
  fi
  # Killed, or ended by the TERM that busybox's timeout does not translate.
  case $rw_r in 137|143) return 124 ;; esac
  return "$rw_r"
}
# rw_lim SECONDS BYTES: pass standard input on, up to BYTES, and give up after SECONDS. cat hands on what
# it has got; head would keep it in a buffer and lose it when it is killed.
rw_lim() {
  if [ "$rw_timeout" ]; then
    { timeout -s KILL "$1" cat; [ "$?" = 137 ] && printf '\n@@rc:124\n'; } | head -c "$2"
    return
  fi
  {
    exec 3<&0
    cat <&3 & rw_h=$!
    rw_kill_after "$1" "$rw_h" >/dev/null 2>&1 3<&- & rw_w=$!
    wait "$rw_h" 2>/dev/null; rw_r=$?
    kill "$rw_w" 2>/dev/null
    [ "$rw_r" = 137 ] && printf '\n@@rc:124\n'
  } | head -c "$2"
}
rw_clean() { tr -d '\000-\010\013-\037\177' | tr '\200-\377' '?' | sed 's/^@@rw:/ &/'; }
# rw NAME SECONDS BYTES COMMAND...: print one section; the command may be a function of this script.
rw() {
  rw_n=$1 rw_d=$2 rw_b=$3; shift 3
  rw_o=$( {
    ( { "$@"; printf '\n@@rc:%s\n' "$?"; } </dev/null 2>&1 & ) | rw_lim "$rw_d" "$rw_b" | rw_clean
  } 2>/dev/null )
  printf '\n@@rw:%s\n%s\n' "$rw_n" "$rw_o"
}
# rw_none NAME: a section that is not tried.
rw_none() { printf '\n@@rw:%s\n@@rc:skip\n' "$1"; }
