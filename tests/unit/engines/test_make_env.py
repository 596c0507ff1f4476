"""make_env.sh with Miniforge's installer: run where nothing fits, its Python makes the environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "tasks" / "onhost" / "make_env.sh"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

# what the real installer does with -b -p: a prefix with bin/conda and bin/python3
INSTALLER = f"""\
#!/bin/sh
[ "$1 $2" = "-b -p" ] || exit 9
mkdir -p "$3/bin" && ln -s {sys.executable} "$3/bin/python3" && echo ran >>"$3.runs"
printf '#!/bin/sh\\necho conda was asked >&2; exit 1\\n' >"$3/bin/conda"; chmod +x "$3/bin/conda"
"""


def make(tmp_path: Path, kind: str, installer: str = INSTALLER) -> tuple[int, dict[str, object], str]:
    script = tmp_path / "Miniforge3-1-Linux-x86_64.sh"
    script.write_text(installer)
    done = subprocess.run(
        ["sh", str(PROGRAM), str(tmp_path / "env"), VERSION, kind, "", str(tmp_path / "conda"), str(script)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_the_installers_python_makes_a_venv_without_asking_conda(tmp_path: Path) -> None:
    rc, answer, log = make(tmp_path, "auto")
    assert rc == 0, log
    assert answer["kind"] == "venv"
    assert (tmp_path / "env" / "bin" / "python").exists()
    assert "conda was asked" not in log
    assert make(tmp_path, "auto")[0] == 0
    assert (tmp_path / "conda.runs").read_text() == "ran\n"


def test_a_broken_installer_leaves_nothing_and_is_named(tmp_path: Path) -> None:
    rc, answer, _ = make(tmp_path, "conda", "#!/bin/sh\nmkdir -p $3; exit 3\n")
    assert rc == 1
    assert answer["error"]["id"] == "conda_failed"  # type: ignore[index]
    assert "Miniforge3-1-Linux-x86_64.sh failed" in answer["error"]["what"]  # type: ignore[index]
    assert not (tmp_path / "conda").exists()


def test_with_kind_conda_the_installers_conda_is_used(tmp_path: Path) -> None:
    rc, answer, log = make(tmp_path, "conda")
    assert rc == 1
    assert "conda was asked" in log
    assert answer["error"]["id"] == "conda_failed"  # type: ignore[index]
