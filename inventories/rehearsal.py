"""The rehearsal: this machine, no GPU. Everything lands in one folder and `uninstall` takes it away."""

import os
from pathlib import Path

_ROOT = (
    "/opt/rackwright-rehearsal"
    if os.geteuid() == 0
    else str(Path("~/.local/share/rackwright/rehearsal").expanduser())
)

hosts = [
    (
        "@local",
        {
            "recipe": "rehearsal-cpu",
            "instance": "rackwright-rehearsal",
            "root": os.environ.get("RACKWRIGHT_REHEARSAL_ROOT", _ROOT),
            "port": int(os.environ.get("RACKWRIGHT_REHEARSAL_PORT", "8017")),
            "api_key": False,  # loopback, and a model that knows nothing
            "sources": ["generate"],
        },
    )
]
