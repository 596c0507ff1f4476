"""A provider's own proxy script (AutoDL: `/etc/network_turbo`), for the servers that it is meant for.

AutoDL documents four: github.com, githubusercontent.com, githubassets.com and huggingface.co, and warns that
the proxy disturbs everything else (https://www.autodl.com/docs/network_turbo/). So only the downloads that
may ask those go through it, and there every other server that the site or `inventories/mirrors.toml` names,
and the host itself, is asked directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tasks.settings import Settings

if TYPE_CHECKING:
    from tasks.plan import Plan

SERVED = ("github.com", "githubusercontent.com", "githubassets.com", "huggingface.co")
ITSELF = ("localhost", "127.0.0.1", "::1")
MODELSCOPE = "modelscope.cn"


def through_proxy(plan: Plan, argv: tuple[str, ...]) -> tuple[str, ...]:
    """A download's argv, behind the site's proxy script where it names one (and uses the network at all)."""
    from tasks.mirrors import candidates  # mirrors are measured by a step, and steps download through here

    script = plan.settings.proxy_script
    if script is None or plan.settings.bundle:
        return argv
    known = [base for kind in candidates().values() for base in kind["candidates"]]
    program = f"{plan.lib}/with_proxy.sh"
    return ("sh", program, script, ",".join(direct(plan.settings, known)), *argv)


def served(url: str) -> bool:
    """A server that such a script's proxy is meant for."""
    host = urlsplit(url).hostname or ""
    return any(host == name or host.endswith(f".{name}") for name in SERVED)


def direct(settings: Settings, known: list[str]) -> list[str]:
    """Hosts that are asked without the proxy: the host itself, every mirror, every server of the site.

    `known` are addresses besides those of the settings.
    """
    addresses = [
        *known,
        *settings.url_mirrors.values(),
        *(settings.extra_index_urls or []),
        *settings.find_links,
        *(settings.index_url, settings.torch_index_url, settings.hub_endpoint),
        *(settings.modelscope_endpoint, settings.s3_endpoint),
    ]
    hosts = [urlsplit(url).hostname for url in addresses if url and not served(url)]
    peers = [settings.peer_address] if settings.peer_address else []
    return list(dict.fromkeys([*ITSELF, MODELSCOPE, *peers, *filter(None, hosts)]))
