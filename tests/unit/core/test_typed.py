"""A command that we suggest acts on the hosts that the typed command acted on."""

from __future__ import annotations

import pytest

from tasks.typed import Typed, typed_from

NOTHING: dict[str, str] = {}


def test_the_inventory_is_as_typed() -> None:
    text = "Fix: rackwright site INVENTORY\nor rackwright logs INVENTORY --limit gpu1"
    assert Typed("my site.py").filled(text) == (
        "Fix: rackwright site 'my site.py'\nor rackwright logs 'my site.py' --limit gpu1"
    )


def test_an_unknown_inventory_stays_a_placeholder() -> None:
    assert Typed().filled("rackwright site INVENTORY") == "rackwright site INVENTORY"


def test_options_that_choose_hosts_and_settings_are_repeated() -> None:
    options = {
        "data": ("port=8001", "lines=5"),
        "limit": ("gpu1",),
        "ssh_port": 2222,
        "sudo": True,
        "dry": True,
    }
    typed = typed_from("mine.py", options, "", NOTHING)
    assert typed.filled("rackwright uninstall INVENTORY -y") == (
        "rackwright uninstall mine.py --data port=8001 --limit gpu1 --ssh-port 2222 --sudo -y"
    )


def test_what_a_suggestion_says_itself_is_not_said_twice() -> None:
    typed = typed_from("m.py", {"data": ("port=1",), "limit": ("a",)}, "", NOTHING)
    text = "rackwright build INVENTORY --limit a --data port=2"
    assert typed.filled(text) == "rackwright build m.py --limit a --data port=2"


@pytest.mark.parametrize("options", [{"ssh_password": "hunter2"}, {"data": ("ssh_password=hunter2",)}])
def test_no_password_is_repeated(options: dict[str, object]) -> None:
    assert "hunter2" not in typed_from("m.py", options, "", NOTHING).filled("rackwright status INVENTORY")


def test_a_password_that_was_given_is_asked_for() -> None:
    typed = typed_from("m.py", {"ssh_password": "x"}, "", NOTHING)
    assert typed.filled("rackwright status INVENTORY") == "rackwright status m.py --ssh-password-prompt"


def test_variables_that_the_inventory_reads_come_first() -> None:
    environ = {"RACKWRIGHT_REHEARSAL_PORT": "8123", "RACKWRIGHT_OTHER": "1", "RACKWRIGHT_HF_TOKEN": "s"}
    text = 'os.environ["RACKWRIGHT_REHEARSAL_PORT"], os.environ["RACKWRIGHT_HF_TOKEN"], "RACKWRIGHT_UNSET"'
    typed = typed_from("rehearsal", {}, text, environ)
    assert typed.filled("look: rackwright status INVENTORY") == (
        "look: RACKWRIGHT_REHEARSAL_PORT=8123 rackwright status rehearsal"
    )
