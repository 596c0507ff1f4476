# CUDA toolkits that compile kernels, at build and at serve time.

# rw_home FOLDER: one toolkit, by its real path.
rw_home() {
  rw_q=$(readlink -f "$1" 2>/dev/null)
  [ -d "$rw_q" ] || return 0
  case " $rw_homes " in *" $rw_q "*) return 0 ;; esac
  rw_homes="$rw_homes $rw_q"
  # A wrapper named nvcc in some bin folder does not make its parent a toolkit.
  [ -d "$rw_q/nvvm" ] || [ -e "$rw_q/include/cuda_runtime.h" ] || return 0
  kv home "$rw_q"
  [ -x "$rw_q/bin/nvcc" ] && kv nvcc "$(t 6 "$rw_q/bin/nvcc" --version 2>&1 | grep -i 'release' | head -n 1)"
  for rw_h in cuda_runtime.h cublas_v2.h curand.h nvrtc.h; do
    for rw_d in include targets/x86_64-linux/include targets/sbsa-linux/include; do
      [ -e "$rw_q/$rw_d/$rw_h" ] && { kv header "$rw_h"; break; }
    done
  done
  [ -x "$rw_q/bin/ptxas" ] && kv ptxas yes
}
rw_cuda() {
  kv CUDA_HOME "$CUDA_HOME"; kv CUDA_HOME_REAL "$(readlink -f "${CUDA_HOME:-/nowhere}")"; kv CUDA_PATH "$CUDA_PATH"
  rw_n=$(PATH=$rw_path command -v nvcc 2>/dev/null)
  kv on_path "$rw_n"
  rw_homes=
  [ "$CUDA_HOME" ] && rw_home "$CUDA_HOME"
  [ "$CUDA_PATH" ] && rw_home "$CUDA_PATH"
  if [ "$rw_n" ]; then
    rw_n=$(readlink -f "$rw_n"); rw_n=${rw_n%/*}
    rw_home "${rw_n%/*}"
  fi
  for rw_k in /usr/local/cuda /usr/local/cuda-[0-9]* /opt/cuda /usr/lib/cuda; do [ -e "$rw_k" ] && rw_home "$rw_k"; done
  if [ "$rw_env_python" ]; then
    rw_k=${rw_env_python%/*}; rw_k=${rw_k%/*}
    [ -x "$rw_k/bin/nvcc" ] && rw_home "$rw_k"
    for rw_v in "$rw_k"/lib/python3*/site-packages/nvidia/cu[0-9]* \
      "$rw_k"/lib/python3*/site-packages/nvidia/cuda_nvcc; do
      [ -x "$rw_v/bin/nvcc" ] && rw_home "$rw_v"
    done
  fi
  return 0
}
rw cuda 25 16384 rw_cuda
