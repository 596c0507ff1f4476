"""A Docker Engine and a registry of the tests' own, and images that stand for an engine's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINNED = "vllm/vllm-openai:nightly-c71a583aa9f81400528e67e3d818f66b804e8340"

# what `nvidia-smi --query-gpu=name` prints; how many it sees depends on what the runtime would have injected
NVIDIA_SMI = """\
#!/bin/sh
case ${NVIDIA_VISIBLE_DEVICES:-none} in
all) n=4 ;; none) echo "Failed to initialize NVML: Unknown Error" >&2; exit 255 ;;
*) n=$(echo "$NVIDIA_VISIBLE_DEVICES" | tr , '\\n' | wc -l) ;;
esac
for i in $(seq $n); do echo "NVIDIA RTX PRO 6000 Blackwell Server Edition"; done
"""


def missing() -> str | None:
    """Why a Docker Engine cannot run here, None when it can."""
    if os.geteuid() != 0:
        return "not root"
    for tool in ("dockerd", "docker", "iptables", "docker-registry"):
        if shutil.which(tool) is None:
            return f"no {tool}"
    return None


class Docker:
    """A running Docker Engine, reached through a `docker` program of its own in `path`."""

    def __init__(self, folder: Path, runtimes: dict[str, object]) -> None:
        self.folder = folder
        self.socket = f"unix://{folder}/docker.sock"
        self.path = folder / "bin"
        self.path.mkdir()
        real = shutil.which("docker")
        shim = self.path / "docker"
        shim.write_text(f'#!/bin/sh\nexec {real} --host {self.socket} "$@"\n')
        shim.chmod(0o755)
        (folder / "daemon.json").write_text(json.dumps({"runtimes": runtimes}))
        argv = ["dockerd", "--config-file", str(folder / "daemon.json"), "--data-root", str(folder / "data")]
        argv += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid"), "--host", self.socket]
        # this machine's own rules stay as they are
        argv += ["--iptables=false", "--ip-masq=false", "--bridge=none"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 180
        while self.run("info", check=False).returncode:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text()[-2000:])
            time.sleep(0.3)

    def run(self, *words: str, check: bool = True, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """A docker command."""
        return subprocess.run(
            [str(self.path / "docker"), *words], capture_output=True, text=True, stdin=subprocess.DEVNULL,
            check=check, timeout=timeout,
        )  # fmt: skip

    def stop(self) -> None:
        """End it, its containers first."""
        names = self.run("ps", "-aq", check=False).stdout.split()
        if names:
            self.run("rm", "-f", *names, check=False)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def import_base(self, root: Path, name: str = "base:1") -> None:
        """An image from a system's folder."""
        tar = subprocess.Popen(
            [
                "tar",
                "-C",
                str(root),
                "--exclude=./var/cache",
                "--exclude=./var/lib/apt",
                "--one-file-system",
                "-c",
                ".",
            ],
            stdout=subprocess.PIPE,
        )
        subprocess.run(
            [str(self.path / "docker"), "import", "-", name],
            stdin=tar.stdout,
            check=True,
            capture_output=True,
        )
        assert tar.wait() == 0

    def derive(self, name: str, files: dict[str, str], base: str = "base:1") -> str:
        """An image with more files (paths of programs are executable); its id."""
        self.run("rm", "-f", "making", check=False)
        self.run("create", "--name", "making", base, "true")
        with tempfile.TemporaryDirectory() as folder:
            for path, text in files.items():
                file = Path(folder) / path.lstrip("/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
                file.chmod(0o755 if "/bin/" in path else 0o644)
            for top in sorted(Path(folder).iterdir()):
                self.run("cp", f"{top}/.", f"making:/{top.name}")
        self.run("commit", "making", name)
        self.run("rm", "making")
        return self.run("image", "inspect", "--format", "{{.Id}}", name).stdout.strip()


def engine_files(vllm: str = "0.26.0", cuda: str = "13.0", flashinfer: str = "0.6.14") -> dict[str, str]:
    """What makes a Debian image look like the engine's: `vllm`, torch, distributions, nvidia-smi."""
    packages = "/usr/lib/python3/dist-packages"
    files = {
        "/usr/local/bin/vllm": (ROOT / "tests" / "standin" / "engine.py").read_text("utf-8"),
        "/usr/local/bin/nvidia-smi": NVIDIA_SMI,
        f"{packages}/torch/__init__.py": "from torch import version\n",
        f"{packages}/torch/version.py": f"cuda = {cuda!r}\n",
    }
    versions = {"vllm": vllm, "torch": f"2.11.0+cu{cuda.replace('.', '')}", "flashinfer-python": flashinfer}
    for name, version in {**versions, "flashinfer-cubin": flashinfer}.items():
        info = f"{packages}/{name.replace('-', '_')}-{version}.dist-info/METADATA"
        files[info] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return files


@contextmanager
def docker_engine(*, nvidia: bool) -> Iterator[Docker]:
    """A Docker Engine; with `nvidia` it has a runtime of that name (runc itself: there are no GPUs here)."""
    # a short path: it holds sockets
    folder = Path(tempfile.mkdtemp(prefix="rwd-"))
    runtimes: dict[str, object] = {"nvidia": {"path": shutil.which("runc")}} if nvidia else {}
    engine = Docker(folder, runtimes)
    try:
        yield engine
    finally:
        engine.stop()
        for mount in [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]:
            if mount.startswith(f"{folder}/"):
                subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def registry() -> Iterator[str]:
    """A registry on loopback; its HOST:PORT."""
    folder = Path(tempfile.mkdtemp(prefix="rwr-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (folder / "config.yml").write_text(
        "version: 0.1\nstorage:\n  filesystem:\n"
        f"    rootdirectory: {folder}/data\n  delete:\n    enabled: true\nhttp:\n  addr: {address}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120
        host, port = address.split(":")
        while socket.socket().connect_ex((host, int(port))):
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
