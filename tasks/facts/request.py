"""What the probe is asked to look at on one host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeRequest:
    """The questions of one probe.

    `root` and `model_root` are the paths of the layout; `paths` are more whose file system matters
    (caches, a wheelhouse). `endpoints` are URLs; their host, port and TLS are tried, all at once.
    `env_python` is the interpreter of the engine's environment, if there may be one.
    `extra_sections` are (name, sh snippet) pairs: their raw output is in `HostFacts.extra[name]`.
    `smi_deadline_s` bounds each call of nvidia-smi: without persistence mode it may take seconds a GPU.
    """

    root: str
    model_root: str
    paths: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    endpoints: tuple[str, ...] = ()
    want_gpu: bool = False
    want_docker: bool = False
    env_python: str | None = None
    extra_sections: tuple[tuple[str, str], ...] = ()
    smi_deadline_s: int = 25
    endpoint_deadline_s: int = 6

    @property
    def disk_paths(self) -> tuple[str, ...]:
        """Every path whose file system is looked at, each once."""
        return tuple(dict.fromkeys((self.root, self.model_root, *self.paths, "/tmp", "/dev/shm")))
