"""Speaks to supervisord for rackwright; runs in the tools env, where the package `supervisor` is.

    sv.py RUN reload          start supervisord if it does not run; read new and changed programs; start none
    sv.py RUN boot NAME       NAME is what `up` starts from now on
    sv.py RUN up              start supervisord and that program (after a reboot of the instance)
    sv.py RUN start NAME      start a program (rivals of this supervisord are stopped first)
    sv.py RUN stop NAME       stop a program and wait until all its processes are gone
    sv.py RUN status          print a JSON list: name, state, pid, start, restarts, boot
    sv.py RUN shutdown        stop everything and supervisord itself

RUN is the folder with supervisord.conf. Processes that a killed supervisord left behind are found and ended.
`supervisorctl start` waits for `startsecs`, which is long here on purpose: so the XML-RPC interface.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable
from typing import Any

# Of the shell that starts supervisord: these must not reach the engine.
STRAY = re.compile(
    r"^(PYTHON|PIP_|UV_|VIRTUAL_ENV|CONDA_|VLLM_|HF_|AWS_|MODELSCOPE_|[A-Z_]*(TOKEN|SECRET|PASSWORD))"
)
STOP_SECONDS = 900  # supervisord itself ends the wait earlier: stopwaitsecs, then SIGKILL
LEFTOVER_SECONDS = 5
CALL_SECONDS = 30  # one that was stopped (SIGSTOP) takes connections and says nothing
DEAF_SECONDS = 15
ENDED = ("STOPPED", "EXITED", "FATAL")


def server(run: str) -> Any:
    """The XML-RPC interface over the Unix socket."""
    from supervisor.xmlrpc import SupervisorTransport

    transport = SupervisorTransport(None, None, serverurl="unix://%s/supervisor.sock" % run)
    return xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport).supervisor


def answers(run: str) -> bool:
    """Whether supervisord runs and answers."""
    try:
        return str(server(run).getState()["statename"]) in ("RUNNING", "RESTARTING")
    except (OSError, xmlrpc.client.Error):
        return False


# --- processes (proc(5)) ---


def processes() -> dict[int, tuple[int, int, str]]:
    """Living processes: pid -> process group, session, name of the supervisord program that it belongs to."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % entry, encoding="utf-8", errors="replace") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found[int(entry)] = (int(fields[2]), int(fields[3]), program_of(entry))
    return found


def program_of(pid: str) -> str:
    """`RUN:NAME` from what supervisord puts into the environment; a process may have overwritten it."""
    try:
        with open("/proc/%s/environ" % pid, "rb") as file:
            pairs = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    url = env.get("SUPERVISOR_SERVER_URL", "")
    return "%s:%s" % (url[len("unix://") :], env.get("SUPERVISOR_PROCESS_NAME", "")) if url else ""


def running_pid(run: str) -> int | None:
    """The pid of a supervisord that was started with this configuration, or None."""
    pid = recorded_pid(run)
    try:
        with open("/proc/%d/cmdline" % (pid or 0), "rb") as file:
            command = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    return pid if run + "/supervisord.conf" in command else None


def recorded_pid(run: str) -> int | None:
    """What the pid file says, whether or not that process lives."""
    try:
        with open(run + "/supervisord.pid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def boot_now() -> str:
    """Of this boot: a container that starts again keeps its machine's boot id, and counts processes anew."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        with open("/proc/1/stat", encoding="utf-8", errors="replace") as file:
            return boot + "/" + file.read().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "unknown"


def mark_boot(run: str) -> None:
    """Note that supervisord runs in this boot: its process id means nothing in another."""
    try:
        with open(run + "/supervisord.boot", "w", encoding="ascii") as file:
            file.write(boot_now() + "\n")
    except OSError as error:  # a full disk must not keep the engine from starting
        sys.stderr.write("supervisord's boot is not noted: %s\n" % error)


def of_this_boot(run: str) -> bool:
    """Whether the supervisord that was noted ran in this boot."""
    try:
        with open(run + "/supervisord.boot", encoding="ascii") as file:
            return file.read().strip() == boot_now()
    except OSError:
        return False


def orphans(run: str) -> dict[int, str]:
    """Processes of programs whose supervisord is dead, or does not answer: pid -> program name.

    supervisord leads a session of its own, and its programs stay in it; the kernel gives a session's number
    to no new process while one of it lives. Environments of other users' processes can often not be read
    in containers, so supervisord's log says which group is which program.
    """
    living, deaf = processes(), running_pid(run)
    dead = recorded_pid(run) if of_this_boot(run) else None
    leader = deaf or (dead if dead not in living else None)
    mine = "%s/supervisor.sock:" % run
    found = {}
    for pid, (group, session, program) in living.items():
        if pid in (os.getpid(), deaf):
            continue
        if program.startswith(mine):
            found[pid] = program[len(mine) :]
        elif leader is not None and session == leader:
            found[pid] = spawned(run).get(group) or booted(run)
    return found


def spawned(run: str) -> dict[int, str]:
    """Program by the process that supervisord started for it, as far back as its log goes."""
    try:
        with open(run + "/../logs/supervisord.log", errors="replace", encoding="utf-8") as file:
            pairs = re.findall(r"spawned: '([^']+)' with pid (\d+)", file.read())
    except OSError:
        return {}
    return {int(pid): name for name, pid in pairs}


def end_all(pids: Any, seconds: float) -> bool:
    """TERM, then KILL what is left; whether all of them are gone."""
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, LEFTOVER_SECONDS)):
        for pid in pids:
            try:
                os.kill(pid, number)
            except OSError:
                continue
        if wait(lambda: not set(pids) & set(processes()), patience):
            return True
    return False


# --- supervisord ---


def serves(run: str) -> bool:
    """Whether supervisord runs and answers; one that just starts is waited for."""
    end = time.monotonic() + DEAF_SECONDS
    while not answers(run):
        if running_pid(run) is None or time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def end_deaf(run: str) -> None:
    """End a supervisord that lives and does not answer, before what it would start again."""
    pid = running_pid(run)
    if pid is not None:
        sys.stderr.write("ending supervisord (process %d), which does not answer\n" % pid)
        if not end_all([pid], 30):
            sys.exit("supervisord (process %d) does not answer and cannot be ended" % pid)


def boot(run: str) -> None:
    """Start supervisord, with an environment that has nothing of the caller's own."""
    if serves(run):
        mark_boot(run)
        return
    end_deaf(run)
    left = orphans(run)
    if left:
        sys.stderr.write("ending %d processes that a killed supervisord left\n" % len(left))
        end_all(left, 30)
    env = {name: value for name, value in os.environ.items() if not STRAY.match(name)}
    command = [os.path.join(os.path.dirname(sys.executable), "supervisord"), "-c", run + "/supervisord.conf"]
    if os.path.isdir("/run/systemd/system") and os.geteuid() == 0:
        # A control group of its own: in ours it would end with the job that runs this. Delegated, because
        # one engine killed for memory must not end supervisord too (OOMPolicy= of systemd.scope(5)).
        command = ["systemd-run", "--quiet", "--scope", "--collect", "--property=Delegate=yes", *command]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=run)
    if done.returncode != 0 or not wait(lambda: answers(run), 20):
        sys.exit("supervisord did not start: " + (done.stderr or done.stdout).strip()[-500:])
    mark_boot(run)


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def states(proxy: Any) -> dict[str, Any]:
    """State of each program by name."""
    return {item["name"]: item for item in proxy.getAllProcessInfo()}


def stop(proxy: Any, name: str) -> None:
    """Stop one program; nothing to do when it does not run. What its processes leave behind is ended too."""
    item = states(proxy).get(name)
    if item is None:
        return
    group = int(item["pid"])
    if item["statename"] not in ENDED:
        try:
            proxy.stopProcess(name, False)
        except xmlrpc.client.Fault as fault:
            if "NOT_RUNNING" not in fault.faultString:
                raise
        if not wait(lambda: states(proxy)[name]["statename"] in ENDED, STOP_SECONDS):
            sys.exit("%s did not stop within %d s" % (name, STOP_SECONDS))
    # workers of an engine whose first process ended at once may live on and hold GPU memory
    left = [pid for pid, (pgrp, _, _) in processes().items() if group and pgrp == group]
    if left and not wait(lambda: not set(left) & set(processes()), LEFTOVER_SECONDS):
        end_all(left, 0)


def reread(proxy: Any) -> None:
    """Take up new, changed and removed programs, as `supervisorctl update` does."""
    added, changed, removed = proxy.reloadConfig()[0]
    for name in removed + changed:
        if name in states(proxy):
            stop(proxy, name)
        proxy.removeProcessGroup(name)
    for name in added + changed:
        proxy.addProcessGroup(name)


def restarts(run: str, name: str) -> int | None:
    """How often the program ended by itself and was started again, since somebody last started it."""
    count = 0
    try:
        with open(run + "/../logs/supervisord.log", errors="replace", encoding="utf-8") as file:
            for line in file:
                if "supervisord started with pid" in line or "stopped: %s (" % name in line:
                    count = 0
                elif "exited: %s (" % name in line:
                    count += 1
    except OSError:
        return None
    return count


def booted(run: str) -> str:
    """The program that `up` starts."""
    try:
        with open(run + "/boot", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def status(run: str) -> list[dict[str, Any]]:
    """How the programs stand; ORPHAN is an engine that runs without its supervisord."""
    chosen = booted(run)
    if not serves(run):
        first: dict[str, int] = {}
        for pid, name in sorted(orphans(run).items()):
            first.setdefault(name, pid)  # the oldest: the one that the others descend from
        return [
            {"name": name, "state": "ORPHAN", "pid": pid, "boot": name == chosen}
            for name, pid in sorted(first.items())
        ]
    return [
        {
            "name": item["name"],
            "state": item["statename"],
            "pid": item["pid"],
            "start": item["start"],
            "restarts": restarts(run, item["name"]),
            "boot": item["name"] == chosen,
        }
        for item in states(server(run)).values()
    ]


def main(argv: list[str]) -> None:
    """Do one verb."""
    socket.setdefaulttimeout(CALL_SECONDS)
    run, verb, name = argv[0], argv[1], argv[2] if len(argv) > 2 else ""
    if verb == "up":
        verb, name = "start", booted(run)
        if not name:
            sys.exit("no program is installed in " + run)
    if verb == "status":
        print(json.dumps(status(run)))
    elif verb == "boot":
        with open(run + "/boot.new", "w", encoding="utf-8") as file:
            file.write(name + "\n")
        os.replace(run + "/boot.new", run + "/boot")
    elif verb == "reload":
        boot(run)
        reread(server(run))
    elif verb == "stop":
        if serves(run):
            stop(server(run), name)
        else:
            end_deaf(run)
            left = [pid for pid, program in orphans(run).items() if program == name]
            if not end_all(left, 60):
                sys.exit("processes of %s cannot be ended" % name)
    elif verb == "start":
        boot(run)
        proxy = server(run)
        reread(proxy)
        for other in states(proxy):
            if other != name:
                stop(proxy, other)
        if states(proxy)[name]["statename"] not in ("STARTING", "RUNNING", "BACKOFF"):
            proxy.startProcess(name, False)
    elif verb == "shutdown":
        if serves(run):
            for name in states(server(run)):
                stop(server(run), name)
            server(run).shutdown()
        else:
            end_deaf(run)
        if not wait(lambda: running_pid(run) is None, STOP_SECONDS):
            sys.exit("supervisord did not end within %d s" % STOP_SECONDS)
        end_all(orphans(run), 30)
    else:
        sys.exit("unknown verb " + verb)


if __name__ == "__main__":
    main(sys.argv[1:])
