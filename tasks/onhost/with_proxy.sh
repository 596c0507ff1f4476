#!/bin/sh
# Runs a command behind the proxy that a script of the host's provider sets, where the host has that script.
#   with_proxy.sh SCRIPT DIRECT COMMAND...
# SCRIPT exports http_proxy and https_proxy when it is sourced (AutoDL: /etc/network_turbo); it is read in a
# shell of its own, and nothing else of it reaches COMMAND. DIRECT: hosts, with commas between, that are asked
# without the proxy (their subdomains too). Without the script, or when it sets nothing, COMMAND runs as it is.
set -u
script=$1 direct=$2
shift 2

if [ ! -r "$script" ]; then
    echo "proxy: $script is not on this host; going without it" >&2
    exec "$@"
fi
# such scripts are written for bash
shell=$(command -v bash) || shell=sh
# its own words are not for the log: they may hold the address
found=$("$shell" -c '
    unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY
    . "$1" >/dev/null 2>&1
    printf "%s\n%s\n" "${http_proxy:-${HTTP_PROXY:-}}" "${https_proxy:-${HTTPS_PROXY:-}}"' sh "$script" </dev/null)
http=$(printf '%s\n' "$found" | sed -n 1p)
https=$(printf '%s\n' "$found" | sed -n 2p)
if [ -z "$http$https" ]; then
    echo "proxy: $script sets no http_proxy; going without it" >&2
    exec "$@"
fi
unset HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY
export http_proxy="${http:-$https}" https_proxy="${https:-$http}"
export no_proxy="$direct${no_proxy:+,$no_proxy}${NO_PROXY:+,$NO_PROXY}"
export NO_PROXY="$no_proxy"
echo "proxy: as $script says, but not for $direct" >&2
exec "$@"
