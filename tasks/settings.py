"""How this site wants it: `host.data` of the inventory, typed and validated once, at the edge."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from tasks.mistakes import Mistakes, explain
from tasks.recipe import Port, Route, SourceName, without_password

# A Unix socket path may hold 107 bytes (unix(7)); supervisor adds a suffix of its own while binding.
LONGEST_ROOT = 80
# Folders that `uninstall` must never be asked to empty.
SHARED_FOLDERS = frozenset(
    """
    / /bin /boot /dev /dev/shm /etc /home /lib /lib64 /media /mnt /opt /proc /root /root/autodl-fs
    /root/autodl-tmp /run /sbin /srv /sys /tmp /usr /usr/local /var
    """.split()  # noqa: SIM905 (a list of quoted slashes is harder to read)
)

# What the distribution owns: neither engine nor weights belong there.
SYSTEM_FOLDERS = ("/bin", "/boot", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")


def _variable(name: str) -> str:
    """The name of a variable on the controller; a token given in its place has lower-case letters."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        raise ValueError("must be the name of a variable of this terminal that holds it, such as HF_TOKEN")
    return name


EnvName = Annotated[str, AfterValidator(_variable)]
# texts that mean True or False (pydantic)
SAID = frozenset(("true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "1", "0"))
# where what people write into a yes-or-no setting belongs
SECRET_PLACES = {
    "api_key": "file run/api-key below root on the host",
    "s3_credentials_env": "variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of this terminal",
}
SupervisorChoice = Literal["auto", "systemd", "systemd-user", "supervisord"]


class Settings(BaseModel):
    """The site's choices for one host. Defaults are the safe ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    instance: str = Field("rackwright", pattern=r"^[a-z][a-z0-9-]{0,40}$")
    root: str = "/opt/rackwright"
    model_root: str | None = None
    route: Route | None = None
    mode: str | None = None
    bind: str = "127.0.0.1"
    port: Port = 8000
    api_key: bool = True
    supervisor: SupervisorChoice = "auto"
    service_user: str | None = Field(None, pattern=r"^[a-z_][a-z0-9_-]*$")
    env_kind: Literal["auto", "conda", "venv"] = "auto"
    python: str | None = None
    sources: list[SourceName] = Field(["huggingface", "modelscope", "s3", "generate"], min_length=1)
    ignore: list[str] = []
    model_path: str | None = None
    model_path_how: Literal["copy", "hardlink", "symlink"] = "copy"
    peer: str | None = None
    peer_address: str | None = None
    peer_port: Port | None = None
    hub_endpoint: str | None = None
    hub_token_file: str | None = None
    hub_token_env: EnvName | None = None
    modelscope_endpoint: str | None = None
    modelscope_token_file: str | None = None
    modelscope_token_env: EnvName | None = None
    s3_bucket: str | None = None
    s3_prefix: str | None = None
    s3_endpoint: str | None = None
    s3_region: str | None = None
    s3_addressing: Literal["auto", "virtual", "path"] = "virtual"
    s3_ca_bundle: str | None = None
    s3_credentials_file: str | None = None
    s3_credentials_env: bool = False
    s3_profile: str | None = None
    s3_anonymous: bool = False
    download_workers: int = Field(8, ge=1, le=64)
    hash_threads: int | None = Field(None, ge=1, le=256)
    index_url: str | None = None
    extra_index_urls: list[str] | None = None
    find_links: list[str] = []
    torch_index_url: str | None = None
    url_mirrors: dict[str, str] = {}
    mirrors: Literal["none", "auto"] = "none"
    proxy_script: str | None = None
    bundle: str | None = None
    wheelhouse: str = "wheelhouse"
    source_archive: str | None = None
    registry_mirrors: list[str] = []
    git_http_version: Literal["HTTP/1.1", "HTTP/2"] | None = None
    max_jobs: int | None = Field(None, ge=1, le=1024)
    nvcc_threads: int | None = Field(None, ge=1, le=64)
    ready_seconds: int | None = Field(None, gt=0)
    strict: bool = False
    deep: bool = False
    reverify: Literal["stamp", "full"] = "stamp"
    profile: Literal["smoke", "standard", "deep"] | None = None
    reports: str = "reports"
    bench_runs: int | None = Field(None, ge=1, le=20)
    bench_rates: list[Annotated[float, Field(gt=0)]] = []
    follow: bool = False
    lines: int = Field(50, ge=1, le=100_000)

    @field_validator(
        *("root", "model_root", "model_path", "python", "source_archive", "bundle", "proxy_script"),
        *("hub_token_file", "modelscope_token_file", "s3_credentials_file", "s3_ca_bundle"),
    )
    @classmethod
    def _plain_absolute_path(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not re.fullmatch(r"/[A-Za-z0-9._/+@-]*", value) or ".." in value.split("/"):
            raise ValueError(
                "must be an absolute path of letters, digits and . _ / + @ - (units break on others)"
            )
        return str(PurePosixPath(value))

    @field_validator(*SECRET_PLACES, mode="before")
    @classmethod
    def _no_secret(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and value.lower() not in SAID:
            place = SECRET_PLACES[info.field_name or ""]
            raise ValueError(f"must be true or false; the secret itself belongs into the {place}")
        return value

    @field_validator("root", "model_root")
    @classmethod
    def _not_the_system_s(cls, value: str | None) -> str | None:
        path = PurePosixPath(value or "/opt")
        system = any(map(path.is_relative_to, SYSTEM_FOLDERS)) and not path.is_relative_to("/usr/local")
        if system or str(path) == "/":
            raise ValueError("belongs to the system; such as /opt/rackwright or a data disk instead")
        return value

    @field_validator("root")
    @classmethod
    def _own_folder(cls, value: str) -> str:
        if value in SHARED_FOLDERS:
            raise ValueError(f"must be a folder of its own, such as {value.rstrip('/')}/rackwright")
        if len(value) > LONGEST_ROOT:
            raise ValueError(f"has {len(value)} characters; at most {LONGEST_ROOT} (sockets lie below)")
        return value

    @field_validator("bind", "peer_address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                ipaddress.ip_address(value)
        except ValueError:
            raise ValueError("must be an IP address, such as 127.0.0.1 or 0.0.0.0") from None
        return value

    @field_validator("index_url", "torch_index_url", "hub_endpoint", "modelscope_endpoint", "s3_endpoint")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://[^\s/]+", value):
            raise ValueError("must be a URL that begins with https:// (or http:// for a local mirror)")
        return value

    @field_validator(
        *("index_url", "torch_index_url", "hub_endpoint", "modelscope_endpoint", "s3_endpoint"),
        *("extra_index_urls", "find_links", "url_mirrors", "registry_mirrors"),
    )
    @classmethod
    def _no_password(cls, value: Any) -> Any:
        urls = [value] if isinstance(value, str) else value or []
        for url in [*urls, *value.values()] if isinstance(value, dict) else urls:
            without_password(url)
        return value

    def misfits(self) -> list[tuple[str, str]]:
        """Settings that are right by themselves and do not fit together: (key, what is wrong)."""
        found = []
        if not ipaddress.ip_address(self.bind).is_loopback and not self.api_key:
            found.append((
                "api_key",
                f"bind = {self.bind!r} serves beyond this host, so api_key = False is refused: "
                "set api_key = True or bind = '127.0.0.1'",
            ))  # fmt: skip
        if "path" in self.sources and self.model_path is None:
            found.append(("sources", "sources names 'path', so model_path must say where the copy lies"))
        if "peer" in self.sources and self.peer is None:
            found.append(("sources", "sources names 'peer', so peer must name a host of this inventory"))
        for hub in ("hub", "modelscope"):
            file, env = f"{hub}_token_file", f"{hub}_token_env"
            if getattr(self, file) and getattr(self, env):
                found.append((env, f"{file} is a file on the host, {env} a variable here: give one"))
        given = {
            "s3_anonymous = True": self.s3_anonymous,
            "s3_credentials_env = True": self.s3_credentials_env,
            "s3_credentials_file": self.s3_credentials_file,
        }
        chosen = [key for key, value in given.items() if value]
        if len(chosen) > 1:
            found.append((chosen[0].split(" ")[0], f"{', '.join(chosen)}: give one of them"))
        return found


# What pyinfra and its connectors read from the same place.
_PYINFRA_PREFIXES = ("ssh_", "_", "docker_", "dockerssh_", "chroot_", "fake_", "vagrant_", "terraform_")


def settings_from(data: Mapping[str, Any], where: Callable[[str], str]) -> Settings:
    """Settings of one host from its inventory data.

    `where` says where a key was given (file, host, `--data`), for the error. Keys of pyinfra and
    its connectors, and keys that begin `x_` (a site's own notes), are left alone.

    Raises Mistakes with every mistake, one a line.
    """
    named = {key: value for key, value in data.items() if isinstance(key, str)}
    own = {key: value for key, value in named.items() if not key.startswith((*_PYINFRA_PREFIXES, "x_"))}
    lines = [f"{where(key)}: {key!r}: the name of a setting must be text" for key in data if key not in named]
    try:
        settings = Settings.model_validate(own)
    except ValidationError as error:
        lines += explain(error, where, Settings)
        wrong = {item["loc"][0] for item in error.errors(include_url=False)}
        rest = {"recipe": "", **{key: value for key, value in own.items() if key not in wrong}}
        settings = Settings.model_validate(rest)  # what is right must still fit together
    lines += [f"{where(key)}: {what}" for key, what in settings.misfits()]
    if lines:
        raise Mistakes(lines)
    return settings


@dataclass(frozen=True)
class Layout:
    """Where things lie on the host (DESIGN §5). Build and serve use the same cache paths."""

    root: str
    model_root: str

    @property
    def env(self) -> str:
        """The engine's own environment."""
        return f"{self.root}/env"

    @property
    def tools(self) -> str:
        """The environment of the downloaders and of supervisor; never mixed with the engine's."""
        return f"{self.root}/tools"

    @property
    def wheels(self) -> str:
        """Verified wheels, kept: a reinstall needs no network."""
        return f"{self.root}/wheels"

    @property
    def src(self) -> str:
        """Source trees of builds and their dependencies."""
        return f"{self.root}/src"

    @property
    def wheelhouse(self) -> str:
        """Engines that were built: one folder a key, with provenance."""
        return f"{self.root}/wheels/built"

    @property
    def lib(self) -> str:
        """The onhost programs, one folder a version."""
        return f"{self.root}/lib"

    @property
    def jobs(self) -> str:
        """State and logs of long work."""
        return f"{self.root}/jobs"

    @property
    def receipts(self) -> str:
        """What was done here, from which inputs."""
        return f"{self.root}/receipts"

    @property
    def logs(self) -> str:
        """Logs of the engine where there is no journal."""
        return f"{self.root}/logs"

    @property
    def run(self) -> str:
        """Sockets, pid files, launch specs and the key."""
        return f"{self.root}/run"

    @property
    def tmp(self) -> str:
        """TMPDIR of builds and of the engine: `/tmp` is small on rented hosts."""
        return f"{self.root}/tmp"

    @property
    def key_file(self) -> str:
        """The API key, 0600, made on the host."""
        return f"{self.run}/api-key"

    def caches(self) -> dict[str, str]:
        """Cache variables of the engine and of builds.

        Source: vLLM `envs.py` (VLLM_CACHE_ROOT, XDG_CACHE_HOME), FlashInfer (FLASHINFER_WORKSPACE_BASE
        is the parent of `.cache/flashinfer`), TileLang, DeepGEMM (DG_JIT_CACHE_DIR), Triton, Inductor.
        """
        cache = f"{self.root}/cache"
        return {
            "XDG_CACHE_HOME": f"{cache}/xdg",
            "VLLM_CACHE_ROOT": f"{cache}/xdg/vllm",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torchinductor",
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "FLASHINFER_WORKSPACE_BASE": f"{cache}/flashinfer",
            "TILELANG_CACHE_DIR": f"{cache}/tilelang",
            "DG_JIT_CACHE_DIR": f"{cache}/deepgemm",
            "HF_HOME": f"{cache}/huggingface",
            "TMPDIR": self.tmp,
        }


def layout_of(settings: Settings) -> Layout:
    """The layout that a site's settings mean."""
    return Layout(settings.root, settings.model_root or f"{settings.root}/models")
