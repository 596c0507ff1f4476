"""install_wheels.py against tiny wheels, with the tests' own pip and no network."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.onhost.tiny_wheels import Host, flip, make_wheel, serving, sha256

BADLY = "0" * 64


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A find-links folder."""
    return tmp_path / "shelf"


@pytest.mark.slow
def test_it_installs_what_the_lock_names_and_the_second_run_changes_nothing(host: Host, shelf: Path) -> None:
    alpha, beta = make_wheel(shelf, "alpha", "1.0"), make_wheel(shelf, "beta", "2.0+cpu")
    host.lock_wheels(alpha, beta)
    wanted = {
        "find_links": [str(shelf)],
        "shims": [{"name": "gamma", "version": "3.0+cpu"}],
        "expect_import": ["alpha", "beta"],
        "expect_versions": {"alpha": "1.0"},
    }

    first = host.run(**wanted)

    assert first.result["changed"] is True
    assert first.result["installed"] == ["alpha==1.0", "beta==2.0+cpu"]
    assert first.result["bytes_downloaded"] == alpha.stat().st_size + beta.stat().st_size
    assert first.result["artifacts"] == [
        {"file": wheel.name, "sha256": sha256(wheel), "bytes": wheel.stat().st_size}
        for wheel in (alpha, beta)
    ]
    assert first.result["versions"] == {"alpha": "1.0", "gamma": "3.0+cpu"}
    assert host.python("import beta; print(beta.VERSION)") == "2.0+cpu"
    assert not host.unfinished
    assert sorted(path.name for path in host.wheels.glob("[!.]*")) == [alpha.name, beta.name]

    alpha.unlink()  # nothing is fetched again, so that it does not matter who still has the wheels
    second = host.run(**wanted)

    assert second.result["changed"] is False
    assert second.result["installed"] == []
    assert second.result["bytes_downloaded"] == 0
    assert second.result["artifacts"] == first.result["artifacts"]


@pytest.mark.slow
def test_progress_tells_phases_with_done_and_total(host: Host, shelf: Path) -> None:
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0"))
    log = host.run(find_links=[str(shelf)]).log
    assert (
        '#progress {"phase": "download", "done": 0, "total": 1, "unit": "packages", "note": "alpha"}' in log
    )
    assert '#progress {"phase": "verify", "done": 1, "total": 1, "unit": "packages", "note": "done"}' in log


@pytest.mark.slow
def test_a_wheel_with_one_flipped_byte_is_refused_and_named(host: Host, shelf: Path) -> None:
    wheel = make_wheel(shelf, "alpha", "1.0")
    right = sha256(wheel)
    host.lock_wheels(wheel)
    flip(wheel)

    error = host.run(find_links=[str(shelf)]).error

    assert error["id"] == "hash_mismatch"
    assert "alpha==1.0" in error["what"] and right in error["what"] and sha256(wheel) in error["what"]
    assert error["file"] == f"file://{wheel}"
    assert not list(host.wheels.glob("*.whl"))
    assert not list(host.site.glob("alpha*"))
    assert not host.unfinished


@pytest.mark.slow
def test_a_kept_wheel_that_went_bad_is_set_aside_and_fetched_again(host: Host, shelf: Path) -> None:
    wheel = make_wheel(shelf, "alpha", "1.0")
    host.lock_wheels(wheel)
    kept = make_wheel(host.wheels, "alpha", "1.0")
    flip(kept)
    wrong = sha256(kept)

    outcome = host.run(find_links=[str(shelf)])

    assert outcome.result["rejected"] == [
        {"file": wheel.name, "expected": sha256(wheel), "got": wrong, "kept_as": wheel.name + ".rejected"}
    ]
    assert sha256(host.wheels / wheel.name) == sha256(wheel)
    assert sha256(host.wheels / (wheel.name + ".rejected")) == wrong
    assert f"{wheel.name} has a wrong SHA-256" in outcome.log


@pytest.mark.slow
def test_right_wheels_in_the_wheelhouse_need_no_index(host: Host) -> None:
    host.lock_wheels(make_wheel(host.wheels, "alpha", "1.0"))
    outcome = host.run(offline=True)
    assert outcome.result["installed"] == ["alpha==1.0"]
    assert outcome.result["bytes_downloaded"] == 0


@pytest.mark.slow
def test_offline_with_a_missing_wheel_says_where_to_put_it(host: Host, shelf: Path) -> None:
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0"))
    error = host.run(offline=True).error
    assert error["id"] == "not_found"
    assert "alpha==1.0" in error["what"]
    assert error["fix"] == f"put the wheel of alpha==1.0 into {host.wheels}"


@pytest.mark.slow
def test_source_distributions_are_not_taken(host: Host, shelf: Path) -> None:
    shelf.mkdir()
    (shelf / "alpha-1.0.tar.gz").write_bytes(b"would run code")
    host.lock.write_text(f"alpha==1.0 --hash=sha256:{sha256(shelf / 'alpha-1.0.tar.gz')}\n")
    error = host.run(find_links=[str(shelf)], offline=True).error
    assert error["id"] == "not_found"
    assert not list(host.wheels.glob("alpha*"))


@pytest.mark.slow
def test_an_unreachable_index_is_told_as_network(host: Host, shelf: Path) -> None:
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0"))
    error = host.run().error  # the harness points pip at a closed port
    assert error["id"] == "network"
    assert "Connection refused" in error["what"]


@pytest.mark.slow
def test_extra_indexes_are_asked_only_for_what_the_first_lacks(host: Host, tmp_path: Path) -> None:
    plain = make_wheel(tmp_path / "main", "alpha", "1.0")
    local = make_wheel(tmp_path / "extra", "beta", "2.0+cpu")
    host.lock_wheels(plain, local)
    with serving(tmp_path / "main") as main, serving(tmp_path / "extra") as extra:
        outcome = host.run(index_url=main.url, extra_index_urls=["http://127.0.0.1:9/simple", extra.url])
    assert outcome.result["installed"] == ["alpha==1.0", "beta==2.0+cpu"]
    assert [path for path in extra.requests if "alpha" in path] == []
    assert extra.fetched(local) == 1


@pytest.mark.slow
def test_an_index_that_serves_other_bytes_is_refused(host: Host, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "main", "alpha", "1.0")
    host.lock_wheels(wheel, alpha=BADLY)
    with serving(tmp_path / "main") as index:
        error = host.run(index_url=index.url).error
    assert error["id"] == "hash_mismatch"
    assert BADLY in error["what"] and sha256(wheel) in error["what"]
    assert not list(host.wheels.glob("*.whl"))


@pytest.mark.slow
def test_credentials_in_an_index_url_are_told_to_nobody(host: Host, tmp_path: Path) -> None:
    host.lock_wheels(make_wheel(tmp_path / "x", "alpha", "1.0+cpu"))
    (tmp_path / "empty").mkdir()
    with serving(tmp_path / "empty") as index:
        outcome = host.run(index_url=index.url, extra_index_urls=["http://user:hunter2@127.0.0.1:9/simple"])
    assert outcome.error["id"] == "network"
    assert "127.0.0.1:9" in outcome.error["what"]
    assert "hunter2" not in outcome.log + str(outcome.document)


@pytest.mark.slow
def test_a_download_that_was_killed_goes_on_where_it_was(host: Host, tmp_path: Path) -> None:
    first, second = (
        make_wheel(tmp_path / "main", "alpha", "1.0+a"),
        make_wheel(tmp_path / "main", "beta", "1.0+a"),
    )
    host.lock_wheels(first, second)
    with serving(tmp_path / "main") as index:
        index.hang_on = "beta"
        child = host.start(index_url=index.url)
        assert index.hanging.wait(60)
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        assert [path.name for path in host.wheels.glob("*.whl")] == [first.name]
        index.hang_on = ""
        index.release.set()
        outcome = host.run(index_url=index.url)
        assert outcome.result["installed"] == ["alpha==1.0+a", "beta==1.0+a"]
        assert index.fetched(first) == 1
    assert outcome.result["bytes_downloaded"] == second.stat().st_size
    assert list(host.tmp.iterdir()) == []


@pytest.mark.slow
def test_a_second_run_waits_for_a_pip_that_outlived_its_program(host: Host, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "main", "alpha", "1.0")
    host.lock_wheels(wheel)
    with serving(tmp_path / "main") as index:
        index.hang_on = "alpha"
        orphaned = host.start(index_url=index.url)
        assert index.hanging.wait(60)
        os.kill(orphaned.pid, signal.SIGKILL)  # the program only; its pip lives on and holds the lock
        next_one = host.start(index_url=index.url)
        assert next_one.stderr is not None
        seen = next_one.stderr.readline()
        asked = len(index.requests)
        index.hang_on = ""
        index.release.set()
        out, err = next_one.communicate(timeout=120)
        orphaned.communicate()
    assert "an earlier installation is still at work" in seen
    assert asked == 2  # the page and the wheel, both by the first
    assert next_one.returncode == 0, out + err


@pytest.mark.slow
def test_sigterm_ends_pip_too_and_says_so(host: Host, tmp_path: Path) -> None:
    host.lock_wheels(make_wheel(tmp_path / "main", "alpha", "1.0"))
    with serving(tmp_path / "main") as index:
        index.hang_on = "alpha"
        child = host.start(index_url=index.url)
        assert index.hanging.wait(60)
        os.kill(child.pid, signal.SIGTERM)
        out, _ = child.communicate(timeout=30)
        assert '"id": "interrupted"' in out
        left = subprocess.run(["pgrep", "-s", str(child.pid)], capture_output=True, text=True, check=False)
        assert left.stdout == ""
    assert child.returncode == 1


@pytest.mark.slow
def test_a_half_made_environment_is_repaired_and_only_where_it_is_damaged(host: Host, shelf: Path) -> None:
    wheels = [make_wheel(shelf, name, "1.0") for name in ("alpha", "beta", "gamma", "delta")]
    host.lock_wheels(*wheels)
    host.run(find_links=[str(shelf)])
    (host.env / ".rackwright-installing").write_text("{}")
    (host.site / "alpha.py").write_text("VERSION = 'cut o")  # as a power cut leaves it
    (host.site / "beta-1.0.dist-info" / "RECORD").unlink()  # as pip leaves it when it is killed
    (host.site / "gamma.py").unlink()
    (host.site / "~elta").mkdir()

    outcome = host.run(offline=True, expect_import=["alpha", "beta", "gamma", "delta"])

    assert outcome.result["changed"] is True
    assert outcome.result["installed"] == ["alpha==1.0", "beta==1.0", "gamma==1.0"]
    assert outcome.result["repaired"] == ["alpha", "beta", "gamma"]
    assert host.python("import alpha; print(alpha.VERSION)") == "1.0"
    assert not (host.site / "~elta").exists()
    assert not host.unfinished
    assert host.run(offline=True).result["changed"] is False


@pytest.mark.slow
def test_the_mark_of_a_half_made_environment_stays_until_the_imports_work(host: Host, shelf: Path) -> None:
    broken = make_wheel(shelf, "alpha", "1.0", {"alpha.py": "raise RuntimeError('needs AVX2')\n"})
    host.lock_wheels(broken)
    error = host.run(find_links=[str(shelf)], expect_import=["alpha"]).error
    assert error["id"] == "import"
    assert error["what"] == "alpha does not import: RuntimeError: needs AVX2"
    assert host.unfinished


@pytest.mark.slow
def test_a_version_that_differs_from_the_lock_is_replaced(host: Host, shelf: Path) -> None:
    old, new = make_wheel(shelf, "alpha", "1.0"), make_wheel(shelf, "alpha", "2.0")
    host.lock_wheels(old)
    host.run(find_links=[str(shelf)])
    host.lock_wheels(new)
    assert host.run(find_links=[str(shelf)]).result["installed"] == ["alpha==2.0"]
    assert [path.name for path in host.site.glob("alpha-*")] == ["alpha-2.0.dist-info"]


@pytest.mark.slow
def test_the_same_version_from_another_wheel_is_replaced(host: Host, shelf: Path) -> None:
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0", {"alpha.py": "BUILD = 1\n"}))
    host.run(find_links=[str(shelf)])
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0", {"alpha.py": "BUILD = 2\n"}))
    outcome = host.run(find_links=[str(shelf)])
    assert outcome.result["installed"] == ["alpha==1.0"]
    assert host.python("import alpha; print(alpha.BUILD)") == "2"


@pytest.mark.slow
def test_neither_constraints_nor_a_target_of_the_host_can_bend_the_lock(host: Host, shelf: Path) -> None:
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0"))
    config = host.root / "pip.conf"
    elsewhere = host.root / "elsewhere"
    (host.root / "constraints.txt").write_text("alpha==9\n")
    config.write_text(
        f"[global]\nconstraint = {host.root}/constraints.txt\n[install]\ntarget = {elsewhere}\n"
    )
    env = {"PIP_CONFIG_FILE": str(config), "PIP_USER": "1", "PIP_CONSTRAINT": f"{host.root}/constraints.txt"}
    outcome = host.run(extra_env=env, find_links=[str(shelf)], expect_import=["alpha"])
    assert outcome.result["installed"] == ["alpha==1.0"]
    assert not elsewhere.exists()


@pytest.mark.slow
def test_find_links_of_the_hosts_pip_configuration_count(host: Host, shelf: Path) -> None:
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0+cpu"))
    config = host.root / "pip.conf"
    config.write_text(f"[global]\nfind-links =\n    {host.root}/nothing\n    {shelf}\n")
    outcome = host.run(extra_env={"PIP_CONFIG_FILE": str(config)})
    assert outcome.result["installed"] == ["alpha==1.0+cpu"]
    assert "Retrying" not in outcome.log  # the closed port that stands for the index was not asked


@pytest.mark.slow
def test_a_shim_that_would_hide_a_real_package_is_refused(host: Host, shelf: Path) -> None:
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0"))
    error = host.run(find_links=[str(shelf)], shims=[{"name": "alpha", "version": "7"}]).error
    assert error["id"] == "verify"
    assert "alpha is really installed" in error["what"]


@pytest.mark.slow
def test_a_shim_of_an_earlier_version_is_replaced(host: Host, shelf: Path) -> None:
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0"))
    host.run(find_links=[str(shelf)], shims=[{"name": "vllm", "version": "0.31.0+cpu"}])
    outcome = host.run(shims=[{"name": "vllm", "version": "0.32.0+cpu"}])
    assert outcome.result["changed"] is True
    assert host.python("from importlib import metadata; print(metadata.version('vllm'))") == "0.32.0+cpu"
    assert [path.name for path in host.site.glob("vllm*")] == ["vllm-0.32.0+cpu.dist-info"]


@pytest.mark.slow
def test_packages_beside_the_lock_are_named_and_left(host: Host, shelf: Path) -> None:
    alpha, beta = make_wheel(shelf, "alpha", "1.0"), make_wheel(shelf, "beta", "1.0")
    host.lock_wheels(alpha, beta)
    host.run(find_links=[str(shelf)])
    host.lock_wheels(alpha)
    outcome = host.run()
    assert outcome.result["extra"] == ["beta"]
    assert outcome.result["changed"] is False


@pytest.mark.slow
def test_entries_whose_marker_does_not_hold_here_are_skipped(host: Host, shelf: Path) -> None:
    wheel = make_wheel(shelf, "alpha", "1.0")
    host.lock.write_text(
        f"alpha==0.9 ; python_full_version < '3.0' --hash=sha256:{BADLY}\n"
        f"alpha==1.0 ; python_full_version >= '3.0' --hash=sha256:{sha256(wheel)}\n"
    )
    assert host.run(find_links=[str(shelf)]).result["installed"] == ["alpha==1.0"]


@pytest.mark.slow
def test_the_systems_python_is_not_installed_into(host: Host, shelf: Path) -> None:
    host.lock_wheels(make_wheel(shelf, "alpha", "1.0"))
    error = host.run(python=f"{sys.base_prefix}/bin/python3", offline=True).error
    assert error["id"] == "env"
    assert error["what"] == "this Python is the system's, not an environment of its own"


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root and mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_the_run_after_it_goes_on(host: Host, shelf: Path) -> None:
    small = make_wheel(shelf, "alpha", "1.0+a")
    big = make_wheel(shelf, "beta", "1.0+a", {"beta.py": "#" + os.urandom(300_000).hex() + "\n"})
    host.lock_wheels(small, big)
    with small_disk(host.wheels, "size=400k"):
        error = host.run(find_links=[str(shelf)]).error
        assert error["id"] == "disk_full"
        assert str(host.wheels) in error["fix"]
        assert [path.name for path in host.wheels.glob("*.whl")] == [small.name]
        assert not host.unfinished
        subprocess.run(["mount", "-o", "remount,size=4m", str(host.wheels)], check=True)
        assert host.run(find_links=[str(shelf)]).result["installed"] == ["alpha==1.0+a", "beta==1.0+a"]


@pytest.mark.slow
def test_inodes_gone_while_installing_leave_the_mark_and_the_run_after_it_repairs(
    host: Host, shelf: Path
) -> None:
    many = make_wheel(shelf, "alpha", "1.0", {f"alpha/m{number}.py": "X = 1\n" for number in range(300)})
    host.lock_wheels(many)
    target = (host.site / "pip").resolve()
    shutil.rmtree(host.site)
    with small_disk(host.root / "site", "size=4m,nr_inodes=60"):
        host.site.symlink_to(host.root / "site")
        (host.root / "site" / "pip").symlink_to(target)
        error = host.run(find_links=[str(shelf)]).error
        assert error["id"] == "inodes"
        assert str(host.root / "site") in error["fix"]
        assert host.unfinished
        subprocess.run(["mount", "-o", "remount,nr_inodes=2000", str(host.root / "site")], check=True)
        outcome = host.run(find_links=[str(shelf)], expect_import=["alpha.m299"])
        assert outcome.result["installed"] == ["alpha==1.0"]
        assert not host.unfinished


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"python": "python3"}, "python must be an absolute path"),
        ({"wheel": "/x"}, "unknown parameter wheel"),
        ({"find_links": "/x"}, "find_links must be a list"),
        ({"shims": [{"name": "x"}]}, "shims must be a list"),
    ],
)
def test_wrong_parameters_are_usage_errors(host: Host, change: dict[str, object], says: str) -> None:
    outcome = host.run(**change)
    assert outcome.status == 2
    assert outcome.document["error"]["id"] == "usage"
    assert says in outcome.document["error"]["what"]
