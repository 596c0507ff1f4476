# Listening sockets with their owners, and endpoints.

rw_ports() {
  for rw_f in /proc/net/tcp /proc/net/tcp6; do
    [ -r "$rw_f" ] && grep ' 0A ' "$rw_f" | sed 's/^/listen=/'
  done
  kv unprivileged "$(cat /proc/sys/net/ipv4/ip_unprivileged_port_start 2>/dev/null)"
  [ -r /proc/net/tcp ]
}
# rw_inodes HEXPORT: inodes of the sockets that listen there.
rw_inodes() {
  cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | while read -r _ rw_l _ rw_s _ _ _ _ _ rw_j _; do
    case $rw_l in *:"$1") [ "$rw_s" = 0A ] && echo "$rw_j" ;; esac
  done
}
# rw_users HEXPORT: users (numbers) of the sockets that listen there.
rw_users() {
  cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | while read -r _ rw_l _ rw_s _ _ _ rw_j _; do
    case $rw_l in *:"$1") [ "$rw_s" = 0A ] && echo "$rw_j" ;; esac
  done | sort -u
}
# rw_kin PID: the processes that it descends from, the nearest first, and its process group, with commas.
rw_kin() {
  rw_k=$1
  rw_v=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f3)
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do
    rw_k=$(sed 's/.*) //' "/proc/$rw_k/stat" 2>/dev/null | cut -d' ' -f2)
    [ "${rw_k:-0}" -gt 1 ] || break
    printf '%s,' "$rw_k"
  done
  printf %s "$rw_v"
}
# rw_owner HEXPORT...: who listens. Never the whole command line: arguments of strangers may hold secrets.
rw_owner() {
  for rw_x in "$@"; do
    for rw_j in $(rw_users "$rw_x"); do
      printf 'user=%s\t%s\n' "$rw_j" "$(getent passwd "$rw_j" 2>/dev/null | cut -d: -f1)"
    done
    for rw_j in $(rw_inodes "$rw_x"); do
      for rw_q in $(ls -l /proc/[0-9]*/fd 2>/dev/null |
        sed -n -e '/^\/proc\//h' -e "/socket:\[$rw_j\]/{" -e 'g;p' -e '}' | sed 's,^/proc/\([0-9]*\)/.*,\1,' |
        sort -u | head -n 4); do
        printf 'owner=%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$rw_x" "$rw_q" "$(cat "/proc/$rw_q/comm" 2>/dev/null)" \
          "$(readlink "/proc/$rw_q/exe" 2>/dev/null)" "$(readlink "/proc/$rw_q/cwd" 2>/dev/null)" \
          "$(tr '\000' '\n' 2>/dev/null <"/proc/$rw_q/cmdline" | head -n 2 | tr '\n' ' ')" \
          "$(rw_kin "$rw_q")"
      done
    done
  done
}

# rw_said INDEX TOOL RC TEXT: the one line of an endpoint, short enough to be written at once.
rw_said() {
  printf 'endpoint=%s tool=%s rc=%s %s%s\n' "$1" "$2" "$3" "${rw_q:+hand=$rw_q }" \
    "$(printf '%s' "$4" | tr '\n' ' ' | cut -c 1-300)"
}
# rw_pip KEY: a setting of pip's, as pip itself finds it: the variable, the user's file, the system's.
rw_pip() {
  rw_v=$(printf 'PIP_%s' "$1" | tr 'a-z-' 'A-Z_')
  eval "rw_v=\${$rw_v:-}"
  if [ "$rw_v" ]; then printf '%s\n' "$rw_v"; return; fi
  for rw_f in "${PIP_CONFIG_FILE:-}" "${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf" "$HOME/.pip/pip.conf" \
    /etc/xdg/pip/pip.conf /etc/pip.conf; do
    if [ "$rw_f" ] && [ -f "$rw_f" ]; then
      rw_v=$(sed -n -e "/^$1[[:space:]]*[=:]/{" -e 's/^[^=:]*[=:][[:space:]]*//' -e p -e :a -e n \
        -e '/^[[:space:]]\{1,\}[^[:space:]]/{' -e 's/^[[:space:]]*//' -e p -e ba -e '}' -e '}' "$rw_f" 2>/dev/null)
      if [ "$rw_v" ]; then printf '%s\n' "$rw_v"; return; fi
    fi
  done
}
# rw_where_to FOLDER...: proxies, where else pip would look, and the folders of wheels: these and pip's own.
rw_where_to() {
  env | sed -n 's/^\([Hh][Tt][Tt][Pp][Ss]\{0,1\}_[Pp][Rr][Oo][Xx][Yy]\|[Aa][Ll][Ll]_[Pp][Rr][Oo][Xx][Yy]\)=.*/proxy=\1/p'
  rw_links="$*"
  for rw_k in find-links extra-index-url; do
    rw_v=$(rw_pip "$rw_k")
    [ "$rw_v" ] || continue
    kv pip "$rw_k"
    [ "$rw_k" = find-links ] && rw_links="$rw_links $rw_v"
  done
}
# rw_at_hand PATTERN...: whether each of these wheels lies in one of the folders; rw_q is how many of all do.
rw_at_hand() {
  rw_c=0
  for rw_w in "$@"; do
    for rw_f in $rw_links; do
      rw_f=${rw_f#file://}
      for rw_k in "${rw_f%/}"/$rw_w; do
        if [ -f "$rw_k" ]; then rw_c=$((rw_c + 1)); break 2; fi
      done
    done
  done
  rw_q=$rw_c/$#
  [ "$rw_c" = "$#" ]
}
# rw_fits VERSION: a Python of that minor version that can make an environment.
rw_fits() {
  for rw_k in "$(rw_where "python$1")" "$(rw_where python3)"; do
    [ "$rw_k" ] && t 5 "$rw_k" -c 'import sys, venv, ensurepip
sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$1" && return 0
  done
  return 1
}
# rw_channel: where the host's conda fetches packages.
rw_channel() {
  rw_k=$(rw_conda | sed -n 's/^prefix=//p')
  for rw_f in "$HOME/.condarc" "$rw_k/.condarc"; do
    rw_v=$(sed -n 's|^[^#]*\(https\{0,1\}://[^ "]*\).*|\1|p' "$rw_f" 2>/dev/null | head -n 1)
    if [ "$rw_v" ]; then printf '%s\n' "$rw_v"; return; fi
    if grep -q conda-forge "$rw_f" 2>/dev/null; then rw_k=miniforge; fi
  done
  case $rw_k in
    *miniforge*|*mambaforge*) echo https://conda.anaconda.org/conda-forge ;;
    *) echo https://repo.anaconda.com/pkgs/main ;;
  esac
}
# rw_url URL: what to try, in rw_u, without user and password; the host's own index or channel where asked for.
rw_url() {
  rw_u=$1
  case $1 in
    pip:*)
      rw_u=$(rw_pip index-url | head -n 1)
      rw_u=${rw_u:-https://pypi.org/simple}
      rw_u=${rw_u%/}/${1#pip:}/ ;;
    conda:*) rw_u=$(rw_channel)/linux-64/repodata.json.zst ;;
  esac
  rw_u=$(printf '%s' "$rw_u" | sed 's,^\([a-z]*://\)[^/@]*@,\1,')
}
# rw_endpoint INDEX URL SECONDS: curl where there is one; else wget, python, or bash's bare connect.
rw_endpoint() {
  rw_e=$(($3 + 1))
  rw_url "$2"
  rw_a="at=$rw_u"
  case $rw_u in file://*)
    rw_o=${rw_u#file://}
    if [ -d "${rw_o%/*/}" ]; then rw_said "$1" folder 0 "$rw_a"; else rw_said "$1" folder 1 "$rw_a no such folder"; fi
    return ;;
  esac
  if has curl; then
    rw_o=$(t "$rw_e" curl -q -sS -o /dev/null -r 0-0 --connect-timeout "$3" -m "$3" \
      -w 'code=%{http_code} seconds=%{time_total}' "$rw_u" 2>&1)
    rw_said "$1" curl "$?" "$rw_a $rw_o"
  elif has wget; then
    rw_o=$(t "$rw_e" wget -T "$3" -O /dev/null "$rw_u" 2>&1)
    rw_said "$1" wget "$?" "$rw_a $(printf '%s' "$rw_o" | tail -n 3)"
  elif has python3; then
    rw_o=$(t "$rw_e" python3 -c 'import sys,urllib.request,urllib.error
try: print("code=%d" % urllib.request.urlopen(sys.argv[1],timeout=float(sys.argv[2])).status)
except urllib.error.HTTPError as e: print("code=%d" % e.code)' "$rw_u" "$3" 2>&1)
    rw_said "$1" python "$?" "$rw_a $(printf '%s' "$rw_o" | tail -n 1)"
  elif has bash; then
    rw_o=${rw_u#*://}; rw_o=${rw_o%%/*}
    case $rw_o in *:*) ;; *) case $rw_u in http://*) rw_o=$rw_o:80 ;; *) rw_o=$rw_o:443 ;; esac ;; esac
    rw_o=$(t "$3" bash -c ': </dev/tcp/${0%:*}/${0##*:}' "$rw_o" 2>&1)
    rw_said "$1" bash "$?" "$rw_a $rw_o"
  else
    rw_said "$1" none 127 'no curl, wget, python3 or bash'
  fi
}

rw ports 5 49152 rw_ports
