"""What the probe is asked to look at on one host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unless:
    """When an endpoint is not asked: `done` (a sh test) holds, or every one of `wheels` is at hand.

    `wheels` are file names, or patterns of them, looked for in the folders that pip would look in; an empty
    tuple says that nobody knows them.
    """

    done: str = "false"
    wheels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """A URL to be tried; where every one of `unless` holds it is not.

    `pip:NAME` is the page of a package on the index that the host's own pip is set to, `conda:` the channel
    of the host's own conda.
    """

    url: str
    unless: tuple[Unless, ...] = ()


@dataclass(frozen=True)
class ProbeRequest:
    """The questions of one probe.

    `root` and `model_root` are the paths of the layout; `paths` are more whose file system matters
    (caches, a wheelhouse). `endpoints` are tried all at once. `links` are the site's folders of wheels.
    `python` is the interpreter that the site names for environments.
    `env_python` is the interpreter of the engine's environment, if there may be one.
    `extra_sections` are (name, sh snippet) pairs: their raw output is in `HostFacts.extra[name]`.
    `smi_deadline_s` bounds each call of nvidia-smi: without persistence mode it may take seconds a GPU.
    """

    root: str
    model_root: str
    paths: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    links: tuple[str, ...] = ()
    want_gpu: bool = False
    want_docker: bool = False
    python: str | None = None
    env_python: str | None = None
    extra_sections: tuple[tuple[str, str], ...] = ()
    smi_deadline_s: int = 25
    endpoint_deadline_s: int = 6

    @property
    def disk_paths(self) -> tuple[str, ...]:
        """Every path whose file system is looked at, each once."""
        return tuple(dict.fromkeys((self.root, self.model_root, *self.paths, "/tmp", "/dev/shm")))
