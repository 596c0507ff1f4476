"""make_env.sh: a conda of the host, and Miniforge's installer where nothing fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


# a conda that the host has: says what it was asked, and makes a prefix as the real one does
CONDA = f"""\
#!/bin/sh
echo "$@" >>"$HOME/asked"
[ "$1 $2 $3 $4" = "create --yes --quiet --prefix" ] || exit 9
mkdir -p "$5/bin" && ln -s {sys.executable} "$5/bin/python"
"""
BROKEN = "#!/bin/sh\necho 'CondaHTTPError: HTTP 000 CONNECTION FAILED' >&2; mkdir -p $5/bin; exit 1\n"


def with_conda(
    home: Path, text: str, kind: str, place: str = "miniconda3"
) -> tuple[int, dict[str, Any], str]:
    conda = home / place / "bin" / "conda"
    conda.parent.mkdir(parents=True, exist_ok=True)
    conda.write_text(text)
    conda.chmod(0o755)
    done = subprocess.run(
        ["sh", str(PROGRAM), str(home / "env"), VERSION, kind],
        env={"PATH": "/usr/bin:/bin", "HOME": str(home)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout), done.stderr


def test_every_place_where_the_probe_finds_a_conda_is_looked_at() -> None:
    probe = (PROGRAM.parents[1] / "facts" / "sh" / "tools.sh").read_text("utf-8")
    places = re.findall(r"[\w$/]+/bin/conda", probe.split("rw_conda() {")[1].split("; do")[0])
    assert len(places) > 8
    ours = PROGRAM.read_text("utf-8").split("find_conda() {")[1].split("; do")[0]
    assert [place for place in places if place not in ours] == []


@pytest.mark.parametrize(("kind", "place"), [("auto", "miniconda3"), ("conda", "anaconda3")])
def test_a_conda_of_the_host_makes_the_environment(kind: str, place: str, tmp_path: Path) -> None:
    rc, answer, log = with_conda(tmp_path, CONDA, kind, place)
    assert rc == 0, log
    assert answer["kind"] == "conda"
    assert answer["python"].startswith(VERSION)
    asked = f"create --yes --quiet --prefix {tmp_path}/env python={VERSION} pip\n"
    assert (tmp_path / "asked").read_text() == asked
    assert with_conda(tmp_path, CONDA, kind, place)[1] == answer
    assert (tmp_path / "asked").read_text() == asked, "made once"


def test_a_broken_conda_is_named_and_its_own_words_are_in_the_log(tmp_path: Path) -> None:
    rc, answer, log = with_conda(tmp_path, BROKEN, "conda")
    assert rc == 1
    assert answer["error"]["id"] == "conda_failed"
    assert f"{tmp_path}/miniconda3/bin/conda create failed" in answer["error"]["what"]
    assert "CondaHTTPError" in log
    assert not (tmp_path / "env").exists(), "a half environment is not left"


def test_a_conda_that_reports_success_and_makes_nothing_is_not_believed(tmp_path: Path) -> None:
    rc, answer, _ = with_conda(tmp_path, "#!/bin/sh\nexit 0\n", "conda")
    assert (rc, answer["error"]["id"]) == (1, "conda_failed")


@pytest.mark.slow
def test_where_the_site_leaves_it_open_a_broken_conda_is_said_and_a_venv_made(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    conda = home / "miniconda3" / "bin" / "conda"
    conda.parent.mkdir(parents=True)
    conda.write_text(BROKEN)
    conda.chmod(0o755)
    done = subprocess.run(
        ["sh", str(PROGRAM), str(home / "env"), VERSION, "auto", sys.executable],
        env={"PATH": "/usr/bin:/bin", "HOME": str(home)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "venv"
    assert "conda create failed; a venv is made instead" in done.stderr
    assert "CondaHTTPError" in done.stderr
