# The file system under each path; a path need not exist yet: its nearest existing parent is looked at.

rw_disk() {
  kv path "$1"
  rw_a=$1
  while [ ! -e "$rw_a" ] && [ "$rw_a" != / ]; do rw_a=${rw_a%/*}; rw_a=${rw_a:-/}; done
  kv at "$rw_a"
  kv exists "$([ "$rw_a" = "$1" ] && echo yes || echo no)"
  kv directory "$([ -d "$rw_a" ] && echo yes || echo no)"
  kv writable "$([ -w "$rw_a" ] && [ -x "$rw_a" ] && echo yes || echo no)"
  kv device "$(t 4 stat -c %d "$rw_a" 2>/dev/null)"
  kv magic "$(t 4 stat -f -c %T "$rw_a" 2>/dev/null)"
  kv space "$(t 4 df -Pk "$rw_a" 2>/dev/null | tail -n 1)"
  kv inodes "$(t 4 df -Pi "$rw_a" 2>/dev/null | tail -n 1)"
}
rw_mounts() {
  rw_k='proc|sysfs|cgroup2?|devpts|mqueue|securityfs|debugfs|tracefs|bpf|pstore|configfs'
  grep -vE "^[^ ]+ [^ ]+ ($rw_k) " /proc/self/mounts
}

rw mounts 5 49152 rw_mounts
