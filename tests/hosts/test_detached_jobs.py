"""Detached work on a host with systemd, which outlives the session that started it."""

from __future__ import annotations

from pathlib import Path

from machines import Machine
from serving import wait_for

from tasks.jobs import Job, parse_status, start_script

JOB_SH = Path(__file__).parents[2] / "tasks" / "onhost" / "job.sh"
# as systemd 241 (Debian 10) answers: OOMPolicy= came with 243
OLDER = """\
#!/bin/sh
case "$*" in *OOMPolicy*) echo 'Unknown assignment: OOMPolicy=continue' >&2; exit 1;; esac
exec /usr/bin/systemd-run "$@"
"""


def test_an_older_systemd_runs_jobs_as_units_too(systemd_host: Machine) -> None:
    job = Job("build", "/srv/job", "k1", ("sh", "-c", "cat /proc/self/cgroup; cat"), stdin="input\n")
    systemd_host.write("/srv/job.sh", JOB_SH.read_text("utf-8"))
    systemd_host.write("/usr/local/bin/systemd-run", OLDER, mode="755")
    try:
        started = systemd_host.run(start_script(job, "/srv/job.sh"), stdin=job.stdin)
        assert started.stdout == "started\n"
        wait_for(lambda: systemd_host.run("test -f /srv/job/rc", check=False).returncode == 0)
        now = parse_status(systemd_host.run("sh /srv/job.sh status /srv/job 4000").stdout)
        assert (now.state, now.rc) == ("done", 0)
        assert "rackwright-job-build.service" in now.result
        assert now.result.endswith("\ninput\n")
    finally:
        systemd_host.run("rm -rf /usr/local/bin/systemd-run /srv/job /srv/job.sh")
