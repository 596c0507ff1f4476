#!/usr/bin/env python3
"""Prove what a status flag cannot: that the GPUs of this host move data, and add it up, together.

Standard library only, Python 3.8 or newer. The measuring itself is done by child processes under a Python
that has torch (the engine's environment, or any other); each has a hard deadline, and all of them are gone
when this program ends. Nothing is left in the GPUs, and nothing stays on the disk.

What is done, in this order:
  torch        which of the given Pythons can import torch with CUDA;
  copies       host to device, device to host, and device to device for every pair, with a check of the data;
  all_reduce   a real one, at 2 GPUs and at all of them: the sum must be right, and it must end. If that
               fails or hangs, again with NCCL_P2P_DISABLE=1 (hosts exist where P2P reads OK and hangs:
               vLLM issue #33041, NCCL issue #2079, and where 2 ranks hang although 4 pass).

The verdict says which NCCL settings this host needs. NVLink multicast (NVLS) stays off unless the
environment says otherwise: it is not what is asked here, and a fault in it can take shared GPUs down.

  deep_probe.py --python /opt/rackwright/env/bin/python
  deep_probe.py --stdin < request.json      progress on stderr, one JSON document on stdout
  python3 -c "$BOOT" --stdin < {"program": this file, "request": ...}    leaves no file on the host (see BOOT)

Request: {"pythons": ["/opt/rackwright/env/bin/python"], "gpus": null, "bytes": 268435456,
          "deadline_s": 90, "total_s": 420, "p2p": "auto"}     every key may be left out
`gpus`: so many, or the indices of those that are meant, as nvidia-smi counts them; null for all.
Exit status: 0 the GPUs work together with the settings of the verdict, 1 they do not (or a process could not
be ended), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, ClassVar, Dict, Iterator, List, Optional, Tuple

Json = Dict[str, Any]

MIB = 1024 * 1024
DEFAULTS: Json = {
    "pythons": [],
    "gpus": None,
    "bytes": 256 * MIB,
    "deadline_s": 90,
    "total_s": 420,
    "p2p": "auto",
}
# Off unless the caller's environment says otherwise.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# Runs this program from its standard input. Children are started that way too: it may be no file.
BOOT = (
    "import json, sys; given = json.load(sys.stdin); "
    "exec(compile(given['program'], 'deep_probe.py', 'exec'), {'__name__': '__main__', 'PIPED': given})"
)
PIPED: Optional[Json] = globals().get("PIPED")
SHM = "/dev/shm"
KILL_WAIT_S = 5
HEARTBEAT_S = 8
STEPS = 4
PR_SET_PDEATHSIG = 1


def source() -> str:
    """This program's own text."""
    if PIPED is not None:
        return str(PIPED["program"])
    with open(os.path.abspath(__file__), encoding="utf-8") as stream:
        return stream.read()


def read_given() -> Any:
    """The JSON request: piped in together with the program, or all of standard input."""
    return PIPED["request"] if PIPED is not None else json.load(sys.stdin)


# ---------------------------------------------------------------- the controlling process


class Children:
    """Every process that was started; `end` leaves none behind."""

    def __init__(self) -> None:
        self.running: List["subprocess.Popen[str]"] = []
        self.stuck: List[int] = []
        self.errors: Dict[int, Any] = {}
        self.program = source()
        self.devices: Optional[List[int]] = None

    def start(self, python: str, kind: str, request: Json, env: Dict[str, str]) -> "subprocess.Popen[str]":
        """Start a worker in a session of its own, its request on stdin; stderr is kept for `last_words`."""
        errors = scratch()
        if self.devices is not None:
            env = dict(env, CUDA_VISIBLE_DEVICES=",".join(str(index) for index in self.devices))
        child = subprocess.Popen(
            [python, "-B", "-c", BOOT, "--worker", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            start_new_session=True,
            universal_newlines=True,
        )
        self.running.append(child)
        self.errors[child.pid] = errors
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps({"program": self.program, "request": request}))
            child.stdin.close()
        return child

    def end(self, children: "Optional[List[subprocess.Popen[str]]]" = None) -> None:
        """Kill these (or all) with whatever they started, and wait a little for each to be gone."""
        ending = list(self.running if children is None else children)
        for child in ending:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in ending:
            try:
                child.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                # In uninterruptible sleep inside the driver: only a reboot ends it. Say so, and go on.
                self.stuck.append(child.pid)
            if child in self.running:
                self.running.remove(child)

    def last_words(self, child: "subprocess.Popen[str]") -> str:
        """The last telling lines that a child wrote on stderr, shortened."""
        stream = self.errors[child.pid]
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 4000))
        lines = [line.strip() for line in stream.read().splitlines() if line.strip()]
        telling = [line for line in lines if "rror" in line or "NCCL" in line or "CUDA" in line]
        return " | ".join((telling or lines)[-3:])[-600:]


def scratch() -> Any:
    """A file for words, in memory: nothing is written on the host, whose disk may be full."""
    try:
        return os.fdopen(os.memfd_create("deep_probe"), "w+", errors="replace")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile(mode="w+", errors="replace")


def segments() -> Dict[str, int]:
    """Shared memory of NCCL and torch that is ours by owner: path -> inode."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.startswith(("nccl-", "torch_")) and status.st_uid == os.getuid():
                    found[entry.path] = status.st_ino
    return found


def sweep(before: Dict[str, int]) -> None:
    """Remove what killed ranks left in shared memory: new since `before`, and mapped by nobody."""
    new = {path for path, inode in segments().items() if before.get(path) != inode}
    if not new:
        return
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open("/proc/%s/maps" % pid, errors="replace") as maps:
            text = maps.read()
            new -= {path for path in new if path in text}
    for path in new:
        with contextlib.suppress(OSError):
            os.unlink(path)


class Progress:
    """The last progress line, said again while a step takes long, so that nobody thinks it hangs."""

    line: ClassVar[Json] = {}

    @classmethod
    def say(cls, done: int, note: str) -> None:
        """One progress line."""
        cls.line = {"phase": "deep", "done": done, "total": STEPS, "unit": "steps", "note": note}
        cls.again()

    @classmethod
    def again(cls) -> None:
        """The same line once more."""
        sys.stderr.write("#progress " + json.dumps(cls.line) + "\n")
        sys.stderr.flush()


def child_env(changes: Json) -> Dict[str, str]:
    """Environment of a child: this one's, multicast off, changes made (None takes a variable away).

    It leaves no caches behind, and counts GPUs as nvidia-smi does.
    """
    env = dict(os.environ)
    for name, value in MULTICAST_OFF.items():
        env.setdefault(name, value)
    env.update(
        PYTHONUNBUFFERED="1",
        PYTHONDONTWRITEBYTECODE="1",
        CUDA_CACHE_DISABLE="1",
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
    )
    env.setdefault("NCCL_DEBUG", "WARN")
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = str(value)
    return env


def answers(children: "List[subprocess.Popen[str]]", deadline: float) -> Iterator[Tuple[int, Optional[Json]]]:
    """What the children print, (which, line) as it comes, and (which, None) when one is done.

    Ends when all are done or at the deadline (monotonic), whichever is first.
    """
    lines: "queue.Queue[Tuple[int, Optional[str]]]" = queue.Queue()

    def read(which: int, child: "subprocess.Popen[str]") -> None:
        assert child.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in child.stdout:
                lines.put((which, line))
        lines.put((which, None))

    for which, child in enumerate(children):
        threading.Thread(target=read, args=(which, child), daemon=True).start()
    left = len(children)
    while left:
        wait = deadline - time.monotonic()
        if wait <= 0:
            return
        try:
            which, line = lines.get(timeout=min(wait, HEARTBEAT_S))
        except queue.Empty:
            Progress.again()
            continue
        if line is None:
            left -= 1
            yield which, None
            continue
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                yield which, json.loads(line)


def run_one(children: Children, python: str, kind: str, request: Json, seconds: float) -> Json:
    """Run one worker to its end. Gives its JSON lines, whether it hung, and its last words."""
    child = children.start(python, kind, request, child_env({}))
    said: List[Json] = []
    ended = False
    for _, line in answers([child], time.monotonic() + seconds):
        if line is None:
            ended = True
        else:
            said.append(line)
    if ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILL_WAIT_S)
    code = child.poll()
    children.end([child])
    return {"lines": said, "hung": not ended, "rc": code, "error": children.last_words(child)}


def find_torch(children: Children, pythons: List[str], seconds: float) -> Json:
    """The first Python that imports torch and sees GPUs; `tried` says what the others lacked."""
    tried: Json = {}
    for python in dict.fromkeys([*pythons, sys.executable, "/usr/bin/python3"]):
        if not python or not os.access(python, os.X_OK):
            continue
        try:
            done = run_one(children, python, "torch", {}, seconds)
        except OSError as error:
            tried[python] = str(error)
            continue
        facts = done["lines"][-1] if done["lines"] else {}
        if facts.get("gpus"):
            return {"python": python, **facts}
        hung = "importing torch did not end" if done["hung"] else ""
        tried[python] = facts.get("why") or hung or done["error"] or "no answer"
    return {"python": None, "tried": tried}


def measure_copies(children: Children, python: str, request: Json, seconds: float) -> Json:
    """Bandwidth of every way data can be copied, and whether it arrived whole. Partial when it hung."""
    done = run_one(children, python, "copies", request, seconds)
    result: Json = {"host_device": [], "peers": [], "status": "ok"}
    index = children.devices if children.devices is not None else list(range(int(request["gpus"])))
    doing = "start"
    for line in done["lines"]:
        if "doing" in line:
            doing = line["doing"]
        elif "gpu" in line:
            result["host_device"].append(dict(line, gpu=index[line["gpu"]]))
        elif "from" in line:
            result["peers"].append(dict(line, **{"from": index[line["from"]], "to": index[line["to"]]}))
    if done["hung"]:
        result.update(status="hang", at=doing)
    elif not any(line.get("done") for line in done["lines"]):
        result.update(status="error", at=doing, error=done["error"] or "exit status %s" % done["rc"])
    elif any(not peer["whole"] for peer in result["peers"]):
        result["status"] = "wrong_data"
    return result


def free_port() -> int:
    """A port on loopback that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def all_reduce(children: Children, python: str, ranks: int, p2p: bool, size: int, seconds: float) -> Json:
    """One real all_reduce over the first `ranks` GPUs. `status`: ok, wrong_sum, hang or error."""
    port = free_port()
    changes: Json = {
        "NCCL_P2P_DISABLE": None if p2p else "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    started, before = time.monotonic(), segments()
    wanted = {"ranks": ranks, "bytes": size, "seconds": seconds}
    group = [
        children.start(python, "rank", {"rank": rank, **wanted}, child_env(changes)) for rank in range(ranks)
    ]
    stages = ["start"] * ranks
    results: Dict[int, Json] = {}
    failed: Optional[int] = None
    try:
        for which, line in answers(group, started + seconds):
            if line is None:
                if which not in results and failed is None:
                    failed = which
                    break  # the others wait for it for ever
            elif "stage" in line:
                stages[which] = str(line["stage"])
            elif "sum_right" in line:
                results[which] = line
                if len(results) == ranks:
                    break
    finally:
        children.end(group)
        sweep(before)
    outcome: Json = {"ranks": ranks, "p2p": p2p, "seconds": round(time.monotonic() - started, 1)}
    if failed is not None:
        outcome.update(
            status="error",
            at=stages[failed],
            error=children.last_words(group[failed]) or "rank %d died" % failed,
        )
    elif len(results) < ranks:
        behind = min(range(ranks), key=lambda rank: (rank in results, rank))
        outcome.update(status="hang", at=stages[behind], error=children.last_words(group[behind]))
    else:
        right = all(result["sum_right"] for result in results.values())
        slowest = min(float(result["bus_gb_s"]) for result in results.values())
        latency = max(float(result["latency_us"]) for result in results.values())
        outcome.update(status="ok" if right else "wrong_sum", bus_gb_s=slowest, latency_us=latency)
    return outcome


def unproven(why: str) -> Json:
    """The verdict where nothing was shown to work, or not to."""
    return {"p2p": None, "works": None, "env": {}, "flags": {}, "why": why}


def verdict(runs: List[Json], copies: Optional[Json], gpus: int) -> Json:
    """Which NCCL settings follow for so many GPUs. `p2p` is None when nothing worked or was to be proven.

    `works` is None where neither is known: a proof is a right sum over all of them.
    """
    off = {"env": {"NCCL_P2P_DISABLE": "1"}, "flags": {"disable-custom-all-reduce": True}}
    if gpus < 2:
        return dict(unproven("a single GPU needs no NCCL settings"), works=True)
    with_p2p = [run for run in runs if run["p2p"]]
    without = [run for run in runs if not run["p2p"]]
    damaged = copies is not None and copies["status"] == "wrong_data"

    def proven(group: List[Json]) -> bool:
        """Right at every number of ranks that was tried, the whole number among them."""
        return all(run["status"] == "ok" for run in group) and gpus in [run["ranks"] for run in group]

    if proven(with_p2p) and not damaged:
        counts = " and ".join(str(run["ranks"]) for run in with_p2p)
        return {
            "p2p": True,
            "works": True,
            "env": {},
            "flags": {},
            "why": "all_reduce is right over %s GPUs" % counts,
        }
    bad = next((run for run in with_p2p if run["status"] != "ok"), None)
    words = {"hang": "hangs", "error": "fails", "wrong_sum": "gives a wrong sum"}
    cause = "peer copies arrive damaged" if damaged else "with P2P all_reduce was not tried"
    if bad is not None:
        cause = "with P2P all_reduce over %d GPUs %s" % (bad["ranks"], words[bad["status"]])
    if proven(without):
        return {"p2p": False, "works": True, **off, "why": cause + ", without P2P it works"}
    if any(run["status"] != "ok" for run in without):
        return {
            "p2p": None,
            "works": False,
            **off,
            "why": cause + ", and without P2P it does not work either",
        }
    if bad is not None or damaged:
        return unproven(cause + ", and without P2P it was not tried over %d GPUs" % gpus)
    return unproven("all_reduce was not tried over %d GPUs" % gpus)


def probe(request: Json, children: Children) -> Json:
    """All of it. Never raises for what the host does; the document says what failed."""
    started = time.monotonic()
    each, total = float(request["deadline_s"]), float(request["total_s"])

    def left() -> float:
        return max(1.0, min(each, total - (time.monotonic() - started)))

    if isinstance(request["gpus"], list):
        children.devices = [int(index) for index in request["gpus"]]
    Progress.say(0, "looking for a Python with torch")
    torch = find_torch(children, [str(python) for python in request["pythons"]], left())
    document: Json = {"torch": torch, "copies": None, "all_reduce": [], "stuck": []}
    if torch["python"] is None:
        document["verdict"] = unproven("no Python with torch")
        return document
    seen, asked = int(torch["gpus"]), request["gpus"]
    wanted = len(asked) if isinstance(asked, list) else int(asked or seen)
    gpus = min(wanted, seen)
    Progress.say(1, "copies between host and %d GPUs" % gpus)
    size = int(request["bytes"])
    document["copies"] = measure_copies(children, torch["python"], {"gpus": gpus, "bytes": size}, left())
    runs: List[Json] = document["all_reduce"]
    if gpus > 1:
        counts = sorted({2, gpus})
        settings = {"auto": [True, False], "on": [True], "off": [False]}[request["p2p"]]
        for p2p in settings:
            for ranks in counts:
                if time.monotonic() - started > total:
                    break
                Progress.say(2, "all_reduce over %d GPUs, P2P %s" % (ranks, "on" if p2p else "off"))
                runs.append(all_reduce(children, torch["python"], ranks, p2p, size, left()))
                if runs[-1]["status"] != "ok":
                    break
            good = all(run["status"] == "ok" for run in runs if run["p2p"] == p2p)
            if good and document["copies"]["status"] != "wrong_data":
                break
    if gpus < wanted:
        document["verdict"] = unproven("torch sees %d of %d GPUs" % (gpus, wanted))
    else:
        document["verdict"] = verdict(runs, document["copies"], gpus)
    document["stuck"] = children.stuck
    document["seconds"] = round(time.monotonic() - started, 1)
    Progress.say(STEPS, document["verdict"]["why"])
    return document


# ---------------------------------------------------------------- the measuring processes (with torch)


def tell(line: Json) -> None:
    """One JSON line to the controlling process."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def die_with_parent() -> None:
    """Be killed when the controlling process dies, however it dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def worker_torch() -> None:
    """What torch there is, and whether it sees GPUs."""
    try:
        import torch
    except Exception as error:
        tell({"gpus": 0, "why": "%s: %s" % (type(error).__name__, str(error)[:200])})
        return
    try:
        gpus = torch.cuda.device_count()
        names = [torch.cuda.get_device_name(i) for i in range(gpus)]
        if gpus:
            torch.zeros(1, device="cuda:0")
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version()) if gpus else None
    except Exception as error:
        tell({"gpus": 0, "why": "%s: %s" % (type(error).__name__, str(error)[:300])})
        return
    why = None if gpus else "torch %s sees no GPU" % torch.__version__
    tell(
        {
            "gpus": gpus,
            "names": names,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": nccl,
            "why": why,
        }
    )


def rate(torch: Any, device: int, size: int, copy: Any) -> float:
    """GB/s of a copy, the best of three rounds (1 GB is 10^9 bytes, as NVIDIA counts)."""
    best = 0.0
    with torch.cuda.device(device):
        copy()
        torch.cuda.synchronize()
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(4):
                copy()
            end.record()
            torch.cuda.synchronize()
            best = max(best, 4 * size / (begin.elapsed_time(end) / 1000) / 1e9)
    return round(best, 2)


def worker_copies(request: Json) -> None:
    """Host to device, device to host, device to device; each is announced before it is tried."""
    import torch

    gpus, size = int(request["gpus"]), int(request["bytes"])
    tell({"doing": "pinned host memory"})
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.copy_(torch.arange(size, dtype=torch.int64).remainder(251).to(torch.uint8))
    sample = slice(0, min(size, MIB))
    buffers = []
    for gpu in range(gpus):
        tell({"doing": "host and GPU %d" % gpu})
        device = torch.empty(size, dtype=torch.uint8, device="cuda:%d" % gpu)
        back = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        down = rate(torch, gpu, size, lambda d=device: d.copy_(host, non_blocking=True))
        up = rate(torch, gpu, size, lambda d=device, b=back: b.copy_(d, non_blocking=True))
        whole = bool(torch.equal(back[sample], host[sample]) and torch.equal(back[-MIB:], host[-MIB:]))
        tell({"gpu": gpu, "to_device_gb_s": down, "to_host_gb_s": up, "whole": whole})
        buffers.append(device)
    for source in range(gpus):
        for target in range(gpus):
            if source == target:
                continue
            tell({"doing": "GPU %d to GPU %d" % (source, target)})
            into = torch.zeros(size, dtype=torch.uint8, device="cuda:%d" % target)
            torch.cuda.synchronize(target)
            speed = rate(torch, source, size, lambda i=into, s=source: i.copy_(buffers[s], non_blocking=True))
            torch.cuda.synchronize(target)
            arrived = into.cpu()
            tell(
                {
                    "from": source,
                    "to": target,
                    "gb_s": speed,
                    "direct": bool(torch.cuda.can_device_access_peer(source, target)),
                    "whole": bool(torch.equal(arrived, host)),
                }
            )
            del into, arrived
    tell({"done": True})


def worker_rank(request: Json) -> None:
    """One rank of an all_reduce: the sum is checked, then it is timed."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    rank, ranks, size = int(request["rank"]), int(request["ranks"]), int(request["bytes"])
    torch.cuda.set_device(rank)
    tell({"stage": "joining the group"})
    wait = timedelta(seconds=float(request["seconds"]))
    dist.init_process_group("nccl", rank=rank, world_size=ranks, timeout=wait)
    tell({"stage": "first all_reduce"})
    elements = max(1024, size // 4)
    values = torch.full((elements,), float(rank + 1), device="cuda", dtype=torch.float32)
    dist.all_reduce(values)
    torch.cuda.synchronize()
    expected = float(ranks * (ranks + 1) // 2)
    right = bool(torch.all(values == expected).item())
    tell({"stage": "timing"})
    small = torch.ones(8192, device="cuda", dtype=torch.float32)

    def seconds_of(tensor: Any, times: int) -> float:
        for _ in range(3):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            dist.all_reduce(tensor)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / times

    values.fill_(0.0)
    large = seconds_of(values, 10)
    latency = seconds_of(small, 50)
    # nccl-tests, doc/PERFORMANCE.md: bus bandwidth of all_reduce is size / time * 2 (n - 1) / n.
    bus = elements * 4 / large * 2 * (ranks - 1) / ranks / 1e9
    tell({"sum_right": right, "bus_gb_s": round(bus, 2), "latency_us": round(latency * 1e6, 1)})
    tell({"stage": "leaving the group"})
    dist.destroy_process_group()


def work(kind: str) -> None:
    """Run one worker; its request is on stdin."""
    die_with_parent()
    request = read_given()
    if kind == "torch":
        worker_torch()
    elif kind == "copies":
        worker_copies(request)
    else:
        worker_rank(request)
    sys.stdout.flush()
    # Tearing CUDA down may hang on a broken driver; everything was said already.
    os._exit(0)


# ---------------------------------------------------------------- the command line


def read_request(given: Json) -> Json:
    """The request with defaults. Raises ValueError naming the key."""
    unknown = sorted(set(given) - set(DEFAULTS))
    if unknown:
        raise ValueError("unknown keys: %s" % ", ".join(unknown))
    request = {**DEFAULTS, **given}
    for name in ("bytes", "deadline_s", "total_s"):
        value = request[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError("%s must be a positive number" % name)
    if request["bytes"] < MIB:
        raise ValueError("bytes must be at least %d" % MIB)
    gpus = request["gpus"]
    if isinstance(gpus, list):
        if not gpus or not all(type(index) is int and index >= 0 for index in gpus):
            raise ValueError("gpus must be a list of indices, a positive number or null")
    elif gpus is not None and (type(gpus) is not int or gpus < 1):
        raise ValueError("gpus must be a list of indices, a positive number or null")
    if request["p2p"] not in ("auto", "on", "off"):
        raise ValueError("p2p must be auto, on or off")
    if not isinstance(request["pythons"], list):
        raise ValueError("pythons must be a list of paths")
    return request


def passed(document: Json) -> bool:
    """Whether everything that was tried is proven."""
    copies = document["copies"]
    return (
        bool(document["verdict"]["works"])
        and bool(copies)
        and copies["status"] == "ok"
        and not document["stuck"]
    )


def in_words(document: Json) -> str:
    """The document for people."""
    torch = document["torch"]
    if torch["python"] is None:
        return "no Python with torch that sees a GPU:\n" + "\n".join(
            "  %s: %s" % pair for pair in torch["tried"].items()
        )
    lines = [
        "torch %s, CUDA %s, NCCL %s, %d GPUs" % (torch["torch"], torch["cuda"], torch["nccl"], torch["gpus"])
    ]
    copies = document["copies"]
    for one in copies["host_device"]:
        lines.append(
            "GPU %(gpu)d: to device %(to_device_gb_s).1f GB/s, to host %(to_host_gb_s).1f GB/s" % one
        )
    for one in copies["peers"]:
        one = {**one, "how": "direct" if one["direct"] else "through the host"}
        lines.append("GPU %(from)d -> %(to)d: %(gb_s).1f GB/s, %(how)s" % one)
    if copies["status"] != "ok":
        lines.append("copies: %s at %s" % (copies["status"], copies.get("at", "-")))
    for run in document["all_reduce"]:
        told = "%.1f GB/s bus" % run["bus_gb_s"] if "bus_gb_s" in run else "at %s" % run.get("at")
        state = "on" if run["p2p"] else "off"
        lines.append("all_reduce, %d GPUs, P2P %s: %s, %s" % (run["ranks"], state, run["status"], told))
    lines.append("verdict: %s" % document["verdict"]["why"])
    return "\n".join(lines)


def main(argv: Optional[List[str]] = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(
        description="Measure copies between host and GPUs and a real all_reduce, with hard deadlines."
    )
    parser.add_argument(
        "--python", action="append", default=[], help="a Python that may have torch (repeatable)"
    )
    parser.add_argument("--gpus", type=int, help="use only the first so many GPUs")
    parser.add_argument("--bytes", type=int, default=DEFAULTS["bytes"], help="bytes of each transfer")
    parser.add_argument(
        "--deadline", type=float, default=DEFAULTS["deadline_s"], help="seconds for each step"
    )
    parser.add_argument(
        "--p2p", choices=("auto", "on", "off"), default="auto", help="which all_reduce to try"
    )
    parser.add_argument("--stdin", action="store_true", help="read one JSON request, print one JSON document")
    parser.add_argument("--worker", choices=("torch", "copies", "rank"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        work(options.worker)
    try:
        if options.stdin:
            given = read_given()
            if not isinstance(given, dict):
                raise ValueError("the request must be a JSON object")
        else:
            given = {
                "pythons": options.python,
                "gpus": options.gpus,
                "bytes": options.bytes,
                "deadline_s": options.deadline,
                "p2p": options.p2p,
            }
        request = read_request(given)
    except ValueError as error:
        print("deep_probe.py: %s" % error, file=sys.stderr)
        return 2
    children = Children()

    def stop(signum: int, frame: Any) -> None:
        children.end()
        sys.exit(128 + signum)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        document = probe(request, children)
    finally:
        children.end()
    print(json.dumps(document) if options.stdin else in_words(document))
    return 0 if passed(document) else 1


if __name__ == "__main__":
    sys.exit(main())
