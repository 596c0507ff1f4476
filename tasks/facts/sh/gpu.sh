# NVIDIA GPUs: what nvidia-smi says, and what the kernel says without it.

rw_find_smi() {
  for rw_k in "$(PATH=$rw_path command -v nvidia-smi 2>/dev/null)" /usr/bin/nvidia-smi /usr/local/bin/nvidia-smi \
    /usr/local/nvidia/bin/nvidia-smi /run/nvidia/driver/usr/bin/nvidia-smi /usr/lib/wsl/lib/nvidia-smi; do
    [ "$rw_k" ] && [ -x "$rw_k" ] && { echo "$rw_k"; return; }
  done
}
rw_smi=$(rw_find_smi)

# A field that an older tool does not know makes the whole query fail: it is left out and asked again.
rw_query() {
  rw_f=index,name,uuid,pci.bus_id,compute_cap,driver_version,memory.total,memory.used,persistence_mode,pstate
  rw_f=$rw_f,ecc.mode.current,ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total
  rw_f=$rw_f,remapped_rows.pending,remapped_rows.failure,mig.mode.current,compute_mode,utilization.gpu
  rw_f=$rw_f,pcie.link.gen.current,pcie.link.gen.max,pcie.link.gen.gpumax,pcie.link.width.current
  rw_f=$rw_f,pcie.link.width.max,temperature.gpu,power.draw,power.limit,power.default_limit,power.max_limit
  rw_f=$rw_f,clocks_event_reasons.active
  rw_i=0
  while [ "$rw_i" -lt 16 ]; do
    rw_a=$(t "$rw_smi_s" "$rw_smi" "--query-gpu=$rw_f" --format=csv 2>&1); rw_c=$?
    rw_k=$(printf '%s\n' "$rw_a" | sed -n 's/^Field "\([^"]*\)" is not a valid field to query.*/\1/p' | head -n 1)
    [ "$rw_k" ] || break
    case $rw_k in clocks_event_reasons.active) rw_f=$rw_f,clocks_throttle_reasons.active ;; esac
    rw_f=$(printf ',%s,' "$rw_f" | sed -e "s/,$rw_k,/,/" -e 's/^,//' -e 's/,$//')
    rw_i=$((rw_i + 1))
  done
  printf '%s\n' "$rw_a"
  return "$rw_c"
}
# The long lists of supported clocks are nine tenths of the answer.
rw_xml() {
  rw_a=$(t "$rw_smi_s" "$rw_smi" -q -x 2>&1); rw_c=$?
  printf '%s\n' "$rw_a" | sed -e '/<supported_clocks>/,/<\/supported_clocks>/d' -e 's/^[[:space:]]*//'
  return "$rw_c"
}
# rw_procs PID...: who these are, with all that started them: engines rename their workers.
# proc=PID<TAB>PARENT,ITS PARENT,...<TAB>NAME<TAB>PROGRAM<TAB>FOLDER
rw_procs() {
  for rw_q in "$@"; do
    [ -d "/proc/$rw_q" ] || continue
    rw_a=$rw_q; rw_v=; rw_i=0
    while [ "$rw_i" -lt 12 ]; do
      rw_a=$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$rw_a/status" 2>/dev/null)
      case $rw_a in ''|0|1) break ;; esac
      rw_v=$rw_v${rw_v:+,}$rw_a
      rw_i=$((rw_i + 1))
    done
    printf 'proc=%s\t%s\t%s\t%s\t%s\n' "$rw_q" "$rw_v" "$(cat "/proc/$rw_q/comm" 2>/dev/null)" \
      "$(readlink "/proc/$rw_q/exe" 2>/dev/null)" "$(readlink "/proc/$rw_q/cwd" 2>/dev/null)"
  done
}
rw_nodes() {
  for rw_k in /dev/nvidia[0-9]* /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia-uvm-tools /dev/nvidia-modeset /dev/gdrdrv \
    /dev/infiniband/uverbs* /dev/dxg; do
    [ -e "$rw_k" ] || continue
    if [ -r "$rw_k" ] && [ -w "$rw_k" ]; then kv "node.$rw_k" yes; else kv "node.$rw_k" no; fi
  done
  kv module "$(cat /sys/module/nvidia/version 2>/dev/null)"
  kv proc "$(head -n 1 /proc/driver/nvidia/version 2>/dev/null)"
  for rw_k in nvidia nvidia_uvm nvidia_peermem nvidia_drm nouveau gdrdrv; do
    [ -d "/sys/module/$rw_k" ] && kv "loaded.$rw_k" yes
  done
  kv hmm_disabled "$(cat /sys/module/nvidia_uvm/parameters/uvm_disable_hmm 2>/dev/null)"
  for rw_k in libcuda.so.1 libnvidia-ml.so.1; do
    rw_q=$(ldconfig -p 2>/dev/null | sed -n "s/.*$rw_k .*x86-64.*=> //p;s/.*$rw_k .*AArch64.*=> //p" | head -n 1)
    for rw_v in "$rw_q" "/usr/lib/x86_64-linux-gnu/$rw_k" "/usr/lib64/$rw_k" "/usr/local/nvidia/lib64/$rw_k" \
      "/usr/lib/wsl/lib/$rw_k"; do
      [ "$rw_v" ] && [ -e "$rw_v" ] && { kv "library.$rw_k" "$(readlink -f "$rw_v")"; break; }
    done
  done
  kv persistenced "$([ -S /run/nvidia-persistenced/socket ] && echo yes || echo no)"
  [ -d /run/systemd/system ] && kv fabricmanager "$(t 4 systemctl is-active nvidia-fabricmanager 2>/dev/null)"
  env | grep -E '^(CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|NCCL_[A-Z0-9_]*|CUDA_DEVICE_ORDER)=' | sed 's/^/env./'
  kv iommu_groups "$(ls /sys/kernel/iommu_groups 2>/dev/null | grep -c .)"
}
# pci=ADDRESS DEVICE NUMANODE DRIVER IOMMUTYPE (- for none), above=ADDRESS BRIDGE... from the root down
rw_pci() {
  for rw_k in /sys/bus/pci/devices/*; do
    [ "$(cat "$rw_k/vendor" 2>/dev/null)" = 0x10de ] || continue
    case $(cat "$rw_k/class") in 0x03*) ;; *) continue ;; esac
    rw_v=$(readlink "$rw_k/driver" 2>/dev/null); rw_v=${rw_v##*/}
    rw_q=$(cat "$rw_k/iommu_group/type" 2>/dev/null)
    printf 'pci=%s %s %s %s %s\n' "${rw_k##*/}" "$(cat "$rw_k/device")" "$(cat "$rw_k/numa_node")" \
      "${rw_v:--}" "${rw_q:--}"
    rw_a=$(readlink -f "$rw_k" 2>/dev/null)
    case $rw_a in /sys/devices/pci*/*) ;; *) continue ;; esac
    rw_a=${rw_a#/sys/devices/pci*/}
    kv above "${rw_k##*/} $(printf '%s' "${rw_a%"${rw_k##*/}"}" | tr / ' ')"
  done
}
rw_kernel_log() {
  rw_k='NVRM: Xid|fallen off the bus|NVRM: GPU at PCI|NVRM: .*RmInitAdapter failed|NVRM: API mismatch'
  if rw_a=$(t 6 dmesg 2>/dev/null) && [ "$rw_a" ]; then kv source dmesg
  elif rw_a=$(t 8 journalctl -k -b -o short-monotonic --no-pager -q -n 20000 2>/dev/null) && [ "$rw_a" ]; then kv source journal
  elif [ "$(id -u)" != 0 ] && rw_a=$(t 6 sudo -n dmesg 2>/dev/null) && [ "$rw_a" ]; then kv source dmesg
  else kv source denied; return 0; fi
  printf '%s\n' "$rw_a" | grep -E "$rw_k" | tail -n 60 | cut -c 1-300 | sed 's/^/log=/'
}
rw_lspci() { t 10 lspci -vvv 2>/dev/null | grep -E '^[0-9a-fA-F:]+\.[0-7] .*(bridge|Bridge|NVIDIA)|ACSCtl:|access denied'; }

if [ "$rw_smi" ]; then
  kv_smi() { kv path "$rw_smi"; t "$rw_smi_s" "$rw_smi"; }
  rw gpu.smi $((rw_smi_s + 4)) 32768 kv_smi
else
  rw_nosmi() { return 127; }
  rw gpu.smi 5 64 rw_nosmi
fi
# rw_ask NAME SECONDS BYTES COMMAND...: one more question, unless nvidia-smi is missing or has hung once.
rw_dead=
rw_note() { case $rw_o in *@@rc:124*|*@@rc:127*) rw_dead=y ;; esac; }
rw_ask() {
  if [ "$rw_dead" ]; then rw_none "gpu.$1"; return; fi
  rw_k=$1; shift
  rw "gpu.$rw_k" "$@"
  rw_note
}
rw_note
rw_ask query $((rw_smi_s * 2)) 65536 rw_query
rw_count=$(printf '%s\n' "$rw_o" | grep -cE '^[0-9]+, ')
rw_ask xml $((rw_smi_s + 4)) 524288 rw_xml
rw_pids=$(printf '%s\n' "$rw_o" | sed -n 's/^<pid>\([0-9]*\)<.*/\1/p' | sort -u | head -n 64)
[ "$rw_pids" ] && rw gpu.procs 6 16384 rw_procs $rw_pids
if [ "$rw_count" -gt 1 ]; then
  rw_ask topo $((rw_smi_s + 4)) 32768 t "$rw_smi_s" "$rw_smi" topo -m
  rw_ask p2p_read $((rw_smi_s + 4)) 32768 t "$rw_smi_s" "$rw_smi" topo -p2p r
  rw_ask p2p_write $((rw_smi_s + 4)) 32768 t "$rw_smi_s" "$rw_smi" topo -p2p w
  rw_ask nvlink $((rw_smi_s + 4)) 65536 t "$rw_smi_s" "$rw_smi" nvlink -s
fi
rw gpu.nodes 12 16384 rw_nodes
rw gpu.pci 8 16384 rw_pci
rw gpu.log 24 32768 rw_kernel_log
if has lspci; then rw gpu.lspci 14 65536 rw_lspci; else rw_none gpu.lspci; fi
