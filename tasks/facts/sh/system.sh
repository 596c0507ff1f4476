# System, CPU, memory, what a container may use, package upgrades.

rw_system() {
  kv sysname "$(uname -s)"; kv kernel "$(uname -r)"; kv machine "$(uname -m)"; kv hostname "$(uname -n)"
  kv uid "$(id -u)"; kv user "$(id -un 2>/dev/null)"; kv groups "$(id -Gn 2>/dev/null)"
  kv home "$HOME"; kv path "$rw_path"; kv epoch "$(date +%s)"
  kv pid1 "$(cat /proc/1/comm 2>/dev/null)"
  kv boot_id "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
  kv uptime "$(cut -d. -f1 /proc/uptime 2>/dev/null)"
  kv nofile_soft "$(ulimit -Sn)"; kv nofile_hard "$(ulimit -Hn)"
  kv memlock_soft "$(ulimit -Sl 2>/dev/null)"; kv memlock_hard "$(ulimit -Hl 2>/dev/null)"
  rw_l=$(getconf GNU_LIBC_VERSION 2>/dev/null)
  [ "$rw_l" ] || rw_l=$(ldd --version 2>&1 | head -n 2 | tr '\n' ' ')
  kv libc "$rw_l"
  # Only words that matter to GPUs: the rest of the command line is nobody's business.
  kv cmdline "$(tr ' ' '\n' </proc/cmdline 2>/dev/null | grep -E 'iommu|^pci|aspm|nvidia|hugepages' | tr '\n' ' ')"
  kv cmdline_read "$([ -r /proc/cmdline ] && echo yes || echo no)"
  sed -n 's/^PRETTY_NAME=/os.PRETTY_NAME=/p' /etc/os-release 2>/dev/null
  kv autodl "$( { [ -d /root/autodl-tmp ] || [ -d /root/autodl-fs ]; } && echo yes || echo no)"
  rw_init
}

rw_init() {
  rw_c=
  [ -e /.dockerenv ] && rw_c=docker
  [ -e /run/.containerenv ] && rw_c=podman
  [ "$rw_c" ] || rw_c=$(cat /run/host/container-manager /run/systemd/container 2>/dev/null | head -n 1)
  [ "$rw_c" ] || rw_c=$(tr '\000' '\n' </proc/1/environ 2>/dev/null | sed -n 's/^container=//p')
  [ "$rw_c" ] || rw_c=$(grep -oE 'docker|kubepods|lxc|containerd|libpod' /proc/1/cgroup 2>/dev/null | head -n 1)
  kv container "$rw_c"
  if [ -d /run/systemd/system ]; then
    kv systemd yes
    kv systemd_state "$(t 4 systemctl is-system-running 2>/dev/null)"
  else
    kv systemd no
  fi
  kv systemd_user "$([ -S "/run/user/$(id -u)/systemd/private" ] && echo yes || echo no)"
  kv linger "$([ -e "/var/lib/systemd/linger/$(id -un 2>/dev/null)" ] && echo yes || echo no)"
  if [ "$(id -u)" = 0 ]; then kv sudo root
  elif has sudo; then
    if t 4 sudo -n true >/dev/null 2>&1; then kv sudo passwordless; else kv sudo password; fi
  else kv sudo none; fi
}

rw_cpu() {
  kv cpus "$(grep -c '^processor' /proc/cpuinfo)"
  kv usable "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
  grep '^model name' /proc/cpuinfo | head -n 1 | sed 's/^model name[^:]*: */model=/'
  grep -E '^(flags|Features)' /proc/cpuinfo | head -n 1 | sed 's/^[A-Za-z]*[^:]*: */flags=/'
  kv numa_nodes "$(ls -d /sys/devices/system/node/node[0-9]* 2>/dev/null | grep -c .)"
}

rw_memory() { sed -n 's/^\([A-Za-z_]*\): *\([0-9]*\).*/\1=\2/p' /proc/meminfo; }

# rw_cgfile FOLDER: limits of one cgroup as FILE:VALUE.
rw_cgfile() {
  for rw_f in memory.max memory.high memory.current cpu.max cpuset.cpus.effective \
    memory.limit_in_bytes memory.usage_in_bytes cpu.cfs_quota_us cpu.cfs_period_us cpuset.cpus; do
    [ -r "$1/$rw_f" ] && printf '%s/%s:%s\n' "$1" "$rw_f" "$(cat "$1/$rw_f" 2>/dev/null)"
  done
  [ -r "$1/memory.stat" ] && sed -n -e 's/^hierarchical_memory_limit /memory.hierarchical:/p' \
    -e 's/^total_inactive_file /memory.inactive:/p' -e 's/^inactive_file /memory.inactive_own:/p' \
    "$1/memory.stat" | sed "s,^,$1/,"
}
# rw_cgwalk MOUNT PATH: this cgroup and all above it. In a container the path may not exist below the mount.
rw_cgwalk() {
  rw_g=$2
  while [ "$rw_g" ] && [ "$rw_g" != / ]; do
    [ -d "$1$rw_g" ] && rw_cgfile "$1$rw_g"
    rw_g=${rw_g%/*}
  done
  rw_cgfile "$1"
}
rw_cgroup() {
  rw_v2=/sys/fs/cgroup/unified
  [ -r /sys/fs/cgroup/cgroup.controllers ] && rw_v2=/sys/fs/cgroup
  [ -d "$rw_v2" ] && rw_cgwalk "$rw_v2" "$(sed -n 's/^0:://p' /proc/self/cgroup)"
  for rw_k in memory cpu cpuset; do
    [ -d "/sys/fs/cgroup/$rw_k" ] || continue
    rw_cgwalk "/sys/fs/cgroup/$rw_k" \
      "$(sed -n "s/^[0-9]*:\(.*,\)\{0,1\}$rw_k\(,.*\)\{0,1\}:\//\//p" /proc/self/cgroup | head -n 1)"
  done
  return 0
}

rw_upgrades() {
  grep -hsE 'APT::Periodic::(Update-Package-Lists|Unattended-Upgrade)' /etc/apt/apt.conf.d/* |
    sed 's/^/periodic=/'
  grep -hsE '^[^/]*nvidia' /etc/apt/apt.conf.d/* | head -n 20 | sed 's/^/blacklist=/'
  [ -x /usr/bin/unattended-upgrade ] && echo unattended=yes
  if [ -d /run/systemd/system ]; then
    for rw_u in apt-daily-upgrade.timer dnf-automatic.timer dnf-automatic-install.timer; do
      kv "timer.$rw_u" "$(t 4 systemctl is-enabled "$rw_u" 2>/dev/null)"
    done
  fi
  has dpkg-query && t 6 dpkg-query -W -f '${db:Status-Want} ${db:Status-Status} ${Package} ${Version}\n' \
    'nvidia-driver*' 'nvidia-dkms*' 'nvidia-kernel*' 'nvidia-open*' 'libnvidia-compute*' 2>/dev/null |
    sed -n 's/^\([a-z]*\) installed /package=\1 /p'
  return 0
}

rw system 25 16384 rw_system
rw cpu 8 16384 rw_cpu
rw memory 5 8192 rw_memory
rw cgroup 8 32768 rw_cgroup
[ "$rw_want_gpu" ] && rw upgrades 25 8192 rw_upgrades
