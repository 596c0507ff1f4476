"""Settings: safe defaults, and every mistake with the place it was made in."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.mistakes import Mistakes
from tasks.settings import layout_of, settings_from


def wrong(**data: Any) -> list[str]:
    with pytest.raises(Mistakes) as caught:
        settings_from({"recipe": "rehearsal-cpu", **data}, lambda key: "here")
    return caught.value.lines


def test_defaults_serve_on_loopback_with_a_key() -> None:
    settings = settings_from({"recipe": "rehearsal-cpu"}, lambda key: "here")
    assert (settings.bind, settings.api_key, settings.mode) == ("127.0.0.1", True, None)


@pytest.mark.parametrize("port", [0, 70000, -1, "x"])
def test_a_port_that_cannot_be_is_refused(port: object) -> None:
    (line,) = wrong(port=port)
    assert line.startswith(f"here: port = {port!r}: ")


@pytest.mark.parametrize("root", ["/root", "/opt", "/root/autodl-tmp", "/dev/shm", "/opt/"])
def test_a_folder_that_others_use_is_no_root(root: str) -> None:
    (line,) = wrong(root=root)
    assert "must be a folder of its own" in line


@pytest.mark.parametrize("key", ["root", "model_root"])
@pytest.mark.parametrize("path", ["/", "/usr/lib/x", "/etc/rackwright", "/proc/1", "/usr"])
def test_neither_root_nor_models_lie_among_the_system_s_folders(key: str, path: str) -> None:
    (line,) = wrong(**{key: path})
    assert line.startswith(f"here: {key} = {path!r}: belongs to the system")


@pytest.mark.parametrize("path", ["/usr/local/rackwright", "/data", "/mnt"])
def test_other_places_may_hold_models(path: str) -> None:
    assert settings_from({"recipe": "rehearsal-cpu", "model_root": path}, str).model_root == path


@pytest.mark.parametrize(
    "root", ["relative", "/opt/a b", "/opt/../etc", "/opt/$HOME", "/opt/a;b", "/opt/a'b"]
)
def test_a_path_that_units_or_shells_would_misread_is_refused(root: str) -> None:
    (line,) = wrong(root=root)
    assert "must be an absolute path" in line


def test_serving_beyond_loopback_without_a_key_is_refused() -> None:
    (line,) = wrong(bind="0.0.0.0", api_key=False)
    assert "api_key = False is refused" in line


@pytest.mark.parametrize(
    "given",
    [
        {"index_url": "https://me:hunter22@example.org/simple"},
        {"s3_endpoint": "https://me:hunter22@example.org"},
        {"extra_index_urls": ["https://a.example.org", "https://me:hunter22@example.org/simple"]},
        {"find_links": ["/data/wheels", "https://me:hunter22@example.org/w"]},
        {"url_mirrors": {"https://github.com/": "https://me:hunter22@example.org/"}},
        {"registry_mirrors": ["me:hunter22@example.org:5000"]},
    ],
)
def test_a_url_that_carries_a_password_is_refused_and_not_shown_back(given: dict[str, Any]) -> None:
    (line,) = wrong(**given)
    assert "must not carry a password" in line
    assert "hunter22" not in line


def test_folders_and_mirrors_without_a_password_are_taken() -> None:
    given = {"find_links": ["/data/wheels@home:1", "wheels@home"], "registry_mirrors": ["r.example.org:5000"]}
    settings = settings_from({"recipe": "rehearsal-cpu", **given}, str)
    assert settings.find_links == given["find_links"]


@pytest.mark.parametrize(
    ("given", "secret"),
    [
        ({"hub_token_env": "hf_abcdefghijklmnopqrst"}, "hf_"),
        ({"modelscope_token_env": "letmein"}, "letmein"),
        ({"api_key": "letmein"}, "letmein"),
        ({"s3_credentials_env": "AKIAIOSFODNN7EXAMPLE"}, "AKIA"),
        ({"s3_credentials_file": "AKIAIOSFODNN7EXAMPLE:letmein"}, "letmein"),
    ],
)
def test_a_token_where_a_name_belongs_is_not_shown_back(given: dict[str, Any], secret: str) -> None:
    (line,) = wrong(**given)
    assert f"{next(iter(given))} = [redacted]: " in line
    assert secret not in line


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"api_key": "sk-verysecret123"}, "belongs into the file run/api-key below root on the host"),
        ({"s3_credentials_env": "AKIA:x"}, "belongs into the variables AWS_ACCESS_KEY_ID and "),
        ({"hub_token_env": "hf_x"}, "must be the name of a variable of this terminal that holds it"),
        ({"deep": "letmein"}, "must be true or false"),
    ],
)
def test_a_secret_in_the_wrong_place_is_told_its_right_one(given: dict[str, Any], fix: str) -> None:
    (line,) = wrong(**given)
    assert fix in line


@pytest.mark.parametrize(("text", "value"), [("True", True), ("no", False), ("0", False), ("ON", True)])
def test_whether_there_is_a_key_may_be_written_as_text(text: str, value: bool) -> None:
    assert settings_from({"recipe": "rehearsal-cpu", "api_key": text}, str).api_key is value


def test_a_source_that_needs_more_says_what() -> None:
    assert "model_path must say where" in wrong(sources=["path"])[0]
    assert "peer must name a host" in wrong(sources=["peer"])[0]


def test_all_mistakes_come_at_once_with_the_nearest_key() -> None:
    lines = wrong(port=0, bindd="x", root="relative")
    assert len(lines) == 3
    assert any("bindd: unknown key; did you mean 'bind'?" in line for line in lines)


def test_two_letters_in_the_wrong_order_are_the_nearest() -> None:
    assert wrong(prot=1) == ["here: prot: unknown key; did you mean 'port'?"]


def test_the_name_of_a_setting_is_text() -> None:
    with pytest.raises(Mistakes) as caught:
        settings_from({"recipe": "r", 5: 6, "port": 0}, lambda key: "here")  # type: ignore[dict-item]
    assert caught.value.lines[0] == "here: 5: the name of a setting must be text"
    assert caught.value.lines[1].startswith("here: port = 0: ")


def test_what_does_not_fit_together_is_told_with_the_rest() -> None:
    lines = wrong(port=0, bind="0.0.0.0", api_key=False, sources=["path"])
    assert [line.split()[1] for line in lines] == ["port", "bind", "sources"]


def test_pyinfra_s_own_keys_and_a_site_s_notes_are_left_alone() -> None:
    settings = settings_from(
        {"recipe": "rehearsal-cpu", "ssh_port": 2222, "_sudo": True, "x_rack": "B4"}, lambda key: "here"
    )
    assert settings.recipe == "rehearsal-cpu"


def test_build_and_serve_share_their_caches_below_root() -> None:
    layout = layout_of(settings_from({"recipe": "r", "root": "/data/rw"}, lambda key: "here"))
    assert layout.model_root == "/data/rw/models"
    assert {path.split("/")[3] for path in layout.caches().values()} == {"cache", "tmp"}
