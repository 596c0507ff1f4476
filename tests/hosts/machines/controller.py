"""How this machine reaches package registries: read at run time, so that test hosts can do the same.

Nothing here names a mirror, a folder or a certificate of its own.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CERTIFICATES = Path("/etc/ssl/certs")
LOCAL_CERTIFICATES = Path("/usr/local/share/ca-certificates")

# fmt: off
# settings of pip that say where packages come from; the rest is this machine's own business
_PIP_KEYS = frozenset({
    "cert", "client-cert", "constraint", "default-timeout", "extra-index-url", "find-links", "index-url",
    "no-index", "proxy", "retries", "timeout", "trusted-host",
})
_ENV_NAMES = (
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)
# fmt: on
_APT_OPTIONS = (
    "Acquire::http",
    "Acquire::https",
    "Acquire::Retries",
    "Acquire::Check-",
    "Acquire::Languages",
)


@dataclass(frozen=True)
class PipSettings:
    """Text of a pip.conf, and the local folders and files that it points to."""

    text: str
    folders: tuple[Path, ...]
    files: tuple[Path, ...]


def os_release() -> tuple[str, str]:
    """Distribution and code name of this machine, e.g. ("debian", "bookworm"); ("", "") where unknown."""
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return "", ""
    values = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}
    return values.get("ID", ""), values.get("VERSION_CODENAME", "")


def apt_sources(distribution: str, release: str) -> list[str]:
    """One-line sources of `release` and its updates that apt uses here, [] when apt names none."""
    fields = "$(REPO_URI)|$(RELEASE)|$(CODENAME)|$(COMPONENT)|$(ORIGIN)"
    listed = _output(["apt-get", "indextargets", "--format", fields, "Created-By: Packages"])
    found: dict[tuple[str, str], list[str]] = {}
    for line in listed.splitlines():
        uri, suite, codename, component, origin = line.split("|")
        ours = origin.lower() == distribution and codename.partition("-")[0] == release
        if ours and component not in found.setdefault((uri, suite), []):
            found[uri, suite].append(component)
    return [f"deb {uri} {suite} {' '.join(components)}" for (uri, suite), components in found.items()]


def apt_options() -> list[str]:
    """Lines of apt configuration about fetching (proxy, retries, date checks) that hold here."""
    return [line for line in _output(["apt-config", "dump"]).splitlines() if line.startswith(_APT_OPTIONS)]


@functools.cache
def pip_settings() -> PipSettings:
    """pip's merged settings here (files, then environment, which wins), as one pip.conf."""
    listed = ""
    for python in (sys.executable, "/usr/bin/python3"):
        listed = _output([python, "-m", "pip", "config", "list"])
        if listed:
            break
    values: dict[str, str] = {}
    for from_environment in (False, True):
        for line in listed.splitlines():
            name, _, literal = line.partition("=")
            section, _, key = name.partition(".")
            if (
                (section == ":env:") == from_environment
                and key in _PIP_KEYS
                and section in ("global", ":env:")
            ):
                values[key] = str(ast.literal_eval(literal))
    folders: list[Path] = []
    files: list[Path] = []
    for token in (token for value in values.values() for token in value.split()):
        path = Path(token.removeprefix("file://"))
        if not path.is_absolute():
            continue
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            # pages of a "simple" index point to files beside it
            folders.append(path.parent if path.name == "simple" else path)
    lines = [f"{key} = {' '.join(value.split())}" for key, value in sorted(values.items())]
    return PipSettings(
        "\n".join(["[global]", *lines, ""]), tuple(dict.fromkeys(folders)), tuple(dict.fromkeys(files))
    )


def environment() -> dict[str, str]:
    """Variables about certificates and proxies that are set here and can hold on a test host too."""
    found = {name: os.environ[name] for name in _ENV_NAMES if os.environ.get(name)}
    return {k: v for k, v in found.items() if not v.startswith("/") or Path(v).is_relative_to(CERTIFICATES)}


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
