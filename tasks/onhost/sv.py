"""Speaks to supervisord for rackwright; runs in the tools env, where the package `supervisor` is.

    sv.py RUN install NAME    start supervisord if it does not run; read changed programs; start none;
                              NAME is what `up` starts from now on
    sv.py RUN up              start supervisord and the installed program (after a reboot of the instance)
    sv.py RUN start NAME      start a program (rivals of this supervisord are stopped first)
    sv.py RUN stop NAME       stop a program and wait until its process group is gone
    sv.py RUN status          print a JSON list: name, state, pid, start, restarts
    sv.py RUN shutdown        stop everything and supervisord itself

`supervisorctl start` waits for `startsecs`, which is long here on purpose: so the XML-RPC interface.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable
from typing import Any

# Of the shell that starts supervisord: these must not reach the engine.
STRAY = re.compile(r"^(PYTHON|PIP_|UV_|VIRTUAL_ENV|CONDA_|VLLM_|HF_|AWS_|MODELSCOPE_|[A-Z_]*(TOKEN|SECRET|PASSWORD))")
STOP_SECONDS = 180


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


def running_pid(run: str) -> int | None:
    """The pid of a supervisord that was started with this configuration, or None."""
    try:
        pid = int(open(run + "/supervisord.pid").read())
        command = open("/proc/%d/cmdline" % pid, "rb").read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
    return pid if run + "/supervisord.conf" in command else None


def boot(run: str) -> None:
    """Start supervisord, with an environment that has nothing of the caller's own."""
    pid = running_pid(run)
    if pid is not None and not answers(run):
        wait(lambda: answers(run) or running_pid(run) is None, 15)
    if answers(run):
        return
    env = {name: value for name, value in os.environ.items() if not STRAY.match(name)}
    command = [os.path.join(os.path.dirname(sys.executable), "supervisord"), "-c", run + "/supervisord.conf"]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=run)
    if done.returncode != 0 or not wait(lambda: answers(run), 20):
        sys.exit("supervisord did not start: " + (done.stderr or done.stdout).strip()[-500:])


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
    """Stop one program; nothing to do when it does not run."""
    item = states(proxy).get(name)
    if item is None or item["statename"] in ("STOPPED", "EXITED", "FATAL"):
        return
    try:
        proxy.stopProcess(name, False)
    except xmlrpc.client.Fault as fault:
        if "NOT_RUNNING" not in fault.faultString:
            raise
    if not wait(lambda: states(proxy)[name]["statename"] in ("STOPPED", "EXITED", "FATAL"), STOP_SECONDS):
        sys.exit("%s did not stop within %d s" % (name, STOP_SECONDS))


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
    """How often supervisord spawned the program since its first start, less one."""
    try:
        log = open(run + "/../logs/supervisord.log", errors="replace").read()
    except OSError:
        return None
    return max(0, log.count("spawned: '%s' with pid" % name) - 1)


def main(argv: list[str]) -> None:
    """Do one verb."""
    run, verb, name = argv[0], argv[1], argv[2] if len(argv) > 2 else ""
    if verb == "status":
        if not answers(run):
            print("[]")
            return
        print(
            json.dumps(
                [
                    {
                        "name": item["name"],
                        "state": item["statename"],
                        "pid": item["pid"],
                        "start": item["start"],
                        "restarts": restarts(run, item["name"]),
                    }
                    for item in states(server(run)).values()
                ]
            )
        )
        return
    if verb == "shutdown":
        if answers(run):
            server(run).shutdown()
        if not wait(lambda: running_pid(run) is None, STOP_SECONDS):
            sys.exit("supervisord did not end within %d s" % STOP_SECONDS)
        return
    if verb == "install":
        boot(run)
        reread(server(run))
        with open(run + "/boot.new", "w") as file:
            file.write(name + "\n")
        os.replace(run + "/boot.new", run + "/boot")
        return
    if verb == "up":
        verb, name = "start", open(run + "/boot").read().strip()
    if verb == "stop":
        if answers(run):
            stop(server(run), name)
        return
    if verb == "start":
        boot(run)
        proxy = server(run)
        reread(proxy)
        for other in states(proxy):
            if other != name:
                stop(proxy, other)
        if states(proxy)[name]["statename"] not in ("STARTING", "RUNNING", "BACKOFF"):
            proxy.startProcess(name, False)
        return
    sys.exit("unknown verb " + verb)


if __name__ == "__main__":
    main(sys.argv[1:])
