#!/bin/sh
# Makes a Python environment and prints one JSON document about it.
#   make_env.sh PREFIX VERSION KIND [PYTHON [CONDA [INSTALLER]]]
# VERSION: 3.11 (exact), or 3.10+ (that or newer). KIND: conda, venv, or auto (conda where the host has
# one, else venv). PYTHON: the interpreter for a venv, when the site names one.
# INSTALLER: Miniforge's, already verified; it is run into CONDA where the host has nothing else that fits.
# Its own Python then makes a venv (no further download); with KIND conda, its conda makes the environment.
# PREFIX/.rackwright-env is written last: an environment without it was interrupted and is made anew.
set -u
prefix=$1 version=$2 kind=$3 python=${4:-} own=${5:-} installer=${6:-}

problem() { # id what fix
    printf '{"error": {"id": "%s", "what": "%s", "fix": "%s"}}\n' "$1" "$2" "$3"
    exit 1
}

# The places where the probe looks too (facts/sh/tools.sh), and our own.
find_conda() {
    for c in "$(command -v conda 2>/dev/null)" "${CONDA_EXE:-}" "${own:+$own/bin/conda}" \
        "$(command -v mamba 2>/dev/null)" "$HOME/miniconda3/bin/conda" "$HOME/miniforge3/bin/conda" \
        "$HOME/anaconda3/bin/conda" "$HOME/mambaforge/bin/conda" /opt/conda/bin/conda /opt/miniconda3/bin/conda \
        /opt/miniforge3/bin/conda /opt/anaconda3/bin/conda /usr/local/miniconda3/bin/conda \
        /root/miniconda3/bin/conda; do
        [ -n "$c" ] && [ -x "$c" ] && { echo "$c"; return; }
    done
}

# Right version, and able to make an environment (Debian splits ensurepip off).
suits() {
    "$1" -c '
import sys
want = sys.argv[1]
have = sys.version_info[:2]
exact = tuple(int(p) for p in want.rstrip("+").split("."))
if not (have >= exact if want.endswith("+") else have == exact):
    sys.exit(1)
import ensurepip, venv
' "$version" 2>/dev/null
}

# The system's own come first: a service user cannot read an interpreter below another user's home.
find_python() {
    exact=${version%+}
    names="/usr/bin/python$exact /usr/local/bin/python$exact"
    case $version in
    *+) for minor in 13 12 11 10; do names="$names /usr/bin/python3.$minor /usr/local/bin/python3.$minor"; done ;;
    esac
    for p in $python $names "${own:+$own/bin/python3}" "$(command -v "python$exact" 2>/dev/null)" \
        "$(command -v python3 2>/dev/null)" "${prefix%/*}/env/bin/python3"; do
        [ -n "$p" ] && [ -x "$p" ] && suits "$p" && { echo "$p"; return; }
        [ -n "$python" ] && [ "$p" = "$python" ] && return
    done
}

if [ -f "$prefix/.rackwright-env" ]; then
    cat "$prefix/.rackwright-env"
    exit 0
fi
rm -rf "$prefix"
mkdir -p "$(dirname "$prefix")" || problem disk "cannot make $(dirname "$prefix")" "free space or inodes there"

if [ -n "$installer" ] && [ ! -f "$own/.rackwright-conda" ]; then
    echo "installing $(basename "$installer") into $own" >&2
    rm -rf "$own"
    if ! sh "$installer" -b -p "$own" >&2; then
        rm -rf "$own"
        problem conda_failed "$(basename "$installer") failed" "read the log lines above (disk full?)"
    fi
    : >"$own/.rackwright-conda"
fi
conda=
if [ "$kind" = conda ] || { [ "$kind" = auto ] && [ -z "$installer" ]; }; then conda=$(find_conda); fi
[ "$kind" = conda ] && [ -z "$conda" ] &&
    problem no_conda "this host has no conda" "install Miniforge, or set env_kind = 'venv'"
if [ -n "$conda" ]; then
    echo "conda: $conda" >&2
    if "$conda" create --yes --quiet --prefix "$prefix" "python=${version%+}" pip >&2 && [ -x "$prefix/bin/python" ]; then
        used=conda
    elif [ "$kind" = conda ]; then
        rm -rf "$prefix"
        problem conda_failed "$conda create failed" "read the log lines above; a mirror can be set in ~/.condarc"
    else
        echo "conda create failed; a venv is made instead" >&2
        rm -rf "$prefix"
    fi
fi
if [ -z "${used:-}" ]; then
    base=$(find_python)
    [ -n "$base" ] || problem no_python "this host has no Python $version that can make a venv" \
        "apt-get install python${version%+} python${version%+}-venv (or set python = '/path/to/python${version%+}')"
    echo "venv from $base" >&2
    if ! "$base" -m venv "$prefix" >&2; then
        rm -rf "$prefix"
        problem venv_failed "$base -m venv failed" "read the log lines above (disk full? then free space)"
    fi
    used=venv
fi
text=$("$prefix/bin/python" - "$used" <<'PY'
import json, os, sys
print(json.dumps({"kind": sys.argv[1], "python": ".".join(map(str, sys.version_info[:3])),
                  "base": os.path.realpath(sys.executable), "prefix": sys.prefix}))
PY
) || problem broken "the new environment's Python does not run" "run again"
printf '%s\n' "$text" >"$prefix/.rackwright-env.new" && mv "$prefix/.rackwright-env.new" "$prefix/.rackwright-env" ||
    problem disk "cannot write in $prefix" "free space or inodes there"
printf '%s\n' "$text"
