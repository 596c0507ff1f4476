# Listening sockets with their owners, and endpoints.

rw_ports() {
  for rw_f in /proc/net/tcp /proc/net/tcp6; do
    [ -r "$rw_f" ] && grep ' 0A ' "$rw_f" | sed 's/^/listen=/'
  done
  [ -r /proc/net/tcp ]
}
# rw_inodes HEXPORT: inodes of the sockets that listen there.
rw_inodes() {
  cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | while read -r _ rw_l _ rw_s _ _ _ _ _ rw_j _; do
    case $rw_l in *:"$1") [ "$rw_s" = 0A ] && echo "$rw_j" ;; esac
  done
}
# rw_owner HEXPORT...: who listens. Never the whole command line: arguments of strangers may hold secrets.
rw_owner() {
  for rw_x in "$@"; do
    for rw_j in $(rw_inodes "$rw_x"); do
      for rw_q in $(ls -l /proc/[0-9]*/fd 2>/dev/null |
        sed -n -e '/^\/proc\//h' -e "/socket:\[$rw_j\]/{" -e 'g;p' -e '}' | sed 's,^/proc/\([0-9]*\)/.*,\1,' |
        sort -u | head -n 4); do
        printf 'owner=%s\t%s\t%s\t%s\t%s\t%s\n' "$rw_x" "$rw_q" "$(cat "/proc/$rw_q/comm" 2>/dev/null)" \
          "$(readlink "/proc/$rw_q/exe" 2>/dev/null)" "$(readlink "/proc/$rw_q/cwd" 2>/dev/null)" \
          "$(tr '\000' '\n' 2>/dev/null <"/proc/$rw_q/cmdline" | head -n 2 | tr '\n' ' ')"
      done
    done
  done
}

# rw_said INDEX TOOL RC TEXT: the one line of an endpoint, short enough to be written at once.
rw_said() { printf 'endpoint=%s tool=%s rc=%s %s\n' "$1" "$2" "$3" "$(printf '%s' "$4" | tr '\n' ' ' | cut -c 1-300)"; }
# rw_endpoint INDEX URL SECONDS HOST PORT: curl where there is one; else wget, python, or bash's bare connect.
rw_endpoint() {
  rw_e=$(($3 + 1))
  if has curl; then
    rw_o=$(t "$rw_e" curl -sS -o /dev/null -r 0-0 --connect-timeout "$3" -m "$3" \
      -w 'code=%{http_code} seconds=%{time_total}' "$2" 2>&1)
    rw_said "$1" curl "$?" "$rw_o"
  elif has wget; then
    rw_o=$(t "$rw_e" wget -T "$3" -O /dev/null "$2" 2>&1)
    rw_said "$1" wget "$?" "$(printf '%s' "$rw_o" | tail -n 3)"
  elif has python3; then
    rw_o=$(t "$rw_e" python3 -c 'import sys,urllib.request,urllib.error
try: print("code=%d" % urllib.request.urlopen(sys.argv[1],timeout=float(sys.argv[2])).status)
except urllib.error.HTTPError as e: print("code=%d" % e.code)' "$2" "$3" 2>&1)
    rw_said "$1" python "$?" "$(printf '%s' "$rw_o" | tail -n 1)"
  elif has bash; then
    rw_o=$(t "$3" bash -c ": </dev/tcp/$4/$5" 2>&1)
    rw_said "$1" bash "$?" "$rw_o"
  else
    rw_said "$1" none 127 'no curl, wget, python3 or bash'
  fi
}
rw_proxies() {
  env | sed -n 's/^\([Hh][Tt][Tt][Pp][Ss]\{0,1\}_[Pp][Rr][Oo][Xx][Yy]\|[Aa][Ll][Ll]_[Pp][Rr][Oo][Xx][Yy]\)=.*/proxy=\1/p'
}

rw ports 5 49152 rw_ports
