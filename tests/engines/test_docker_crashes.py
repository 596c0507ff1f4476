"""`docker-engine.sh` when somebody is killed: no container is left behind, and two never run at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator

import pytest
from dockers import ROOT, Docker, docker_engine

SCRIPT = str(ROOT / "tasks" / "onhost" / "docker-engine.sh")
NAME, IMAGE = "rackwright-eager", "sleeper:1"


@pytest.fixture(scope="module")
def docker(docker_can_run: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """A Docker Engine with an image that can sleep, and nothing else."""
    archive = tmp_path_factory.mktemp("image") / "image.tar"
    needs = subprocess.run(["ldd", "/bin/sleep"], capture_output=True, text=True, check=True).stdout.split()
    with tarfile.open(archive, "w") as tar:
        for path in ["/bin/sleep", *(word for word in needs if word.startswith("/"))]:
            tar.add(os.path.realpath(path), path.lstrip("/"))
    with docker_engine(nvidia=False) as engine:
        engine.run("import", str(archive), IMAGE)
        yield engine


@pytest.fixture
def engine(docker: Docker) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start the script as a supervisor does: a process group of its own. Ended with the test."""
    env = {**os.environ, "PATH": f"{docker.path}:{os.environ['PATH']}"}
    started = []

    def start() -> subprocess.Popen[bytes]:
        argv = ["sh", SCRIPT, NAME, "1", "--rm", "--network=none", "--log-driver=none", IMAGE]
        process = subprocess.Popen(
            [*argv, "/bin/sleep", "600"], env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        kill_group(process)
    docker.run("rm", "--force", NAME, check=False)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """What a supervisor does in the end; nothing where it is gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def containers(docker: Docker) -> list[str]:
    """Ids of all containers, also of those that do not run."""
    return docker.run("ps", "--all", "--quiet", "--no-trunc", check=False).stdout.split()


def running(docker: Docker, other_than: str = "") -> str:
    """The id of the one container that runs."""
    deadline = time.monotonic() + 120
    while True:
        found = docker.run("ps", "--quiet", "--no-trunc", check=False).stdout.split()
        if len(found) == 1 and found[0] != other_than:
            return found[0]
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def restart(docker: Docker) -> None:
    """A new daemon in the place of the one that was killed, as its own supervisor does it."""
    # where nobody reaps what a killed daemon leaves, its containerd looks alive to the next one
    for path in ("pid", "exec/containerd/containerd.pid"):
        (docker.folder / path).unlink(missing_ok=True)
    with (docker.folder / "log").open("ab") as log:
        docker.process = subprocess.Popen(
            docker.process.args, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    deadline = time.monotonic() + 120
    while docker.run("info", check=False).returncode:
        assert docker.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)


def test_a_container_whose_run_was_killed_goes_when_its_supervisor_says_so(
    docker: Docker, engine: Callable[[], subprocess.Popen[bytes]]
) -> None:
    process = engine()
    orphan = running(docker)
    kill_group(process)
    assert containers(docker) == [orphan], "docker knows nothing of what happened to its client"
    env = {**os.environ, "PATH": f"{docker.path}:{os.environ['PATH']}"}
    for _ in range(2):
        subprocess.run(["sh", SCRIPT, "--remove", NAME], env=env, check=True)
        assert containers(docker) == []


def test_the_next_start_ends_the_container_of_a_run_that_was_killed(
    docker: Docker, engine: Callable[[], subprocess.Popen[bytes]]
) -> None:
    process = engine()
    orphan = running(docker)
    kill_group(process)
    engine()
    now = running(docker, other_than=orphan)
    assert containers(docker) == [now]


def test_when_docker_is_killed_the_run_ends_and_the_next_one_serves_alone(
    docker: Docker, engine: Callable[[], subprocess.Popen[bytes]]
) -> None:
    process = engine()
    before = running(docker)
    docker.process.kill()
    docker.process.wait()
    assert process.wait(120) != 0, "its supervisor sees a crash, and tries again"
    engine()  # while docker is away
    restart(docker)
    now = running(docker, other_than=before)
    assert containers(docker) == [now]


def test_a_container_that_was_killed_ends_its_run(
    docker: Docker, engine: Callable[[], subprocess.Popen[bytes]]
) -> None:
    process = engine()
    docker.run("kill", running(docker))
    assert process.wait(120) == 137
    assert containers(docker) == []
