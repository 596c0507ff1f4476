# Docker Engine and what lets it hand GPUs to containers.

rw_docker() {
  rw_k=$(PATH=$rw_path command -v docker 2>/dev/null)
  kv path "$rw_k"
  [ "$rw_k" ] || return 0
  t 8 docker info --format 'server={{.ServerVersion}}
runtimes={{range $name, $runtime := .Runtimes}}{{$name}} {{end}}
default_runtime={{.DefaultRuntime}}
root={{.DockerRootDir}}
storage={{.Driver}}' 2>&1
  # containers of ours, by the label that they are run with: what they hold is not a stranger's
  rw_c=$(t 4 docker ps --quiet --filter label=org.rackwright.spec 2>/dev/null)
  [ "$rw_c" ] && kv pids "$(t 4 docker inspect --format '{{.State.Pid}}' $rw_c 2>/dev/null | tr '\n' ' ')"
  return 0
}
rw_container_toolkit() {
  kv ctk "$(t 5 nvidia-ctk --version 2>/dev/null | head -n 1)"
  kv cli "$(t 5 nvidia-container-cli --version 2>/dev/null | head -n 1)"
  for rw_k in /etc/cdi/*nvidia* /var/run/cdi/*nvidia*; do [ -e "$rw_k" ] && kv cdi "$rw_k"; done
  return 0
}

rw docker 12 8192 rw_docker
rw_q=$(printf '%s\n' "$rw_o" | sed -n 's/^root=//p')
rw container_toolkit 12 4096 rw_container_toolkit
case $rw_q in /*) rw disk.docker 12 4096 rw_disk "$rw_q" ;; esac
