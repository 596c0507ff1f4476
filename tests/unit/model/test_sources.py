"""What a site makes of a recipe's sources: who is asked, with which token, and what preflight says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.mistakes import Mistakes
from tasks.model import sources
from tasks.onhost import weight_sources
from tasks.receipts import Receipt
from tasks.recipe import Recipe, load_recipe
from tasks.settings import Settings, settings_from

COMMIT = "a" * 40
HF, MS = {"repo": "acme/x", "revision": COMMIT}, {"repo": "acme/y", "revision": "v1"}
S3 = {"bucket": "b", "prefix": "models/x"}


def recipe(manifest: str | None = "manifests/rehearsal-cpu.sha256", **found: Any) -> Recipe:
    known = load_recipe("rehearsal-cpu")
    model = known.model.model_dump() | {"manifest": manifest, "sources": found}
    return Recipe.model_validate({**known.model_dump(), "file": known.file, "model": model})


def settings(**data: Any) -> Settings:
    return settings_from({"recipe": "rehearsal-cpu", **data}, lambda key: "here")


def source(name: Any, of: Recipe, **data: Any) -> dict[str, Any]:
    found = sources.source_of(name, of, settings(**data))
    assert found is not None
    # what the program on the host takes it for
    weight_sources.make_source(found, "/tmp/none")
    return found


def test_each_hub_gets_its_own_token_file_and_endpoint() -> None:
    site = {
        "hub_token_file": "/etc/hf",
        "modelscope_token_file": "/etc/ms",
        "hub_endpoint": "https://hf.example",
        "modelscope_endpoint": "https://ms.example",
    }
    both = recipe(huggingface=HF, modelscope=MS)
    first, second = source("huggingface", both, **site), source("modelscope", both, **site)
    assert (first["token_file"], first["endpoint"], first["revision"]) == (
        "/etc/hf", "https://hf.example", COMMIT,
    )  # fmt: skip
    assert (second["token_file"], second["endpoint"], second["repo"]) == (
        "/etc/ms", "https://ms.example", "acme/y",
    )  # fmt: skip


def test_a_measured_mirror_serves_unless_the_site_names_one_or_a_token_would_travel() -> None:
    mirror, hub = "https://hf-mirror.test", recipe(huggingface=HF)

    def at(measured: str | None, **site: Any) -> dict[str, Any]:
        found = sources.source_of("huggingface", hub, settings(**site), measured)
        assert found is not None
        weight_sources.make_source(found, "/tmp/none")
        return found

    assert at(mirror)["endpoint"] == mirror
    assert at(mirror)["anonymous"] is True  # whatever token the host's environment holds
    assert "endpoint" not in at(None) and "anonymous" not in at(None)
    for own in ({"hub_endpoint": "https://own.test"}, {"hub_token_file": "/etc/hf"}, {"hub_token_env": "T"}):
        assert at(mirror, **own) == at(None, **own)
        assert at(mirror, **own).get("endpoint") == own.get("hub_endpoint")


def test_a_source_that_the_recipe_does_not_pin_is_none() -> None:
    nothing = recipe(huggingface=HF)
    for name in ("modelscope", "s3", "path", "peer", "generate"):
        assert sources.source_of(name, nothing, settings()) is None  # type: ignore[arg-type]


def test_storage_of_the_site_replaces_the_recipes_whole_address() -> None:
    assert source("s3", recipe(s3=S3))["prefix"] == "models/x"
    own = source("s3", recipe(s3=S3), s3_bucket="mine")
    assert (own["bucket"], own["prefix"]) == ("mine", "")
    assert source("s3", recipe(s3=S3), s3_prefix="other")["prefix"] == "other"
    assert source("s3", recipe(), s3_bucket="mine", s3_prefix="p")["prefix"] == "p"


def test_storage_takes_every_way_to_give_credentials() -> None:
    found = source(
        "s3", recipe(s3=S3), s3_endpoint="https://s3.example", s3_region="eu-1", s3_profile="rack",
        s3_credentials_file="/etc/s3", s3_ca_bundle="/etc/ca.pem",
    )  # fmt: skip
    assert found["addressing"] == "virtual"
    assert (found["profile"], found["credentials_file"]) == ("rack", "/etc/s3")
    assert (found["region"], found["ca_bundle"]) == ("eu-1", "/etc/ca.pem")
    assert source("s3", recipe(s3=S3), s3_anonymous=True)["anonymous"] is True


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"hub_token_file": "/etc/hf", "hub_token_env": "HF"}, "give one"),
        ({"modelscope_token_file": "/etc/ms", "modelscope_token_env": "MS"}, "give one"),
        ({"s3_anonymous": True, "s3_credentials_env": True}, "give one of them"),
        ({"s3_credentials_file": "/etc/s3", "s3_credentials_env": True}, "give one of them"),
        ({"hub_token_env": "hf_abcdefghij"}, "hub_token_env"),
        ({"hub_token_file": "token"}, "absolute path"),
        ({"peer": "gpu1", "peer_address": "gpu1.local"}, "must be an IP address"),
        ({"token_file": "/etc/hf"}, "unknown key"),
    ],
)
def test_secrets_that_contradict_each_other_or_are_in_the_wrong_place_are_mistakes(
    data: dict[str, Any], words: str
) -> None:
    with pytest.raises(Mistakes, match=words):
        settings(**data)


def test_secrets_of_the_controller_are_those_that_its_sources_need() -> None:
    environ = {
        "A": "hf-secret\n",
        "B": "ms-secret",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
    }
    site = {"hub_token_env": "A", "modelscope_token_env": "B", "s3_credentials_env": True}
    all_three = recipe(huggingface=HF, modelscope=MS, s3=S3)
    assert sources.secrets_of(all_three, settings(**site), environ) == {
        "HF_TOKEN": "hf-secret",
        "MODELSCOPE_API_TOKEN": "ms-secret",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
    }
    only = settings(**site, sources=["modelscope"])
    assert sources.secrets_of(all_three, only, environ) == {"MODELSCOPE_API_TOKEN": "ms-secret"}
    assert sources.secrets_of(recipe(huggingface=HF), settings(), {"HF_TOKEN": "not asked for"}) == {}


def ids(of: Recipe, environ: dict[str, str] | None = None, **data: Any) -> dict[str, str]:
    return {found.id: found.status for found in sources.findings(of, settings(**data), environ or {})}


def test_a_missing_secret_is_found_before_anything_is_changed() -> None:
    hub = recipe(huggingface=HF)
    assert ids(hub, hub_token_env="A")["weights.secrets"] == "fail"
    assert ids(hub, {"A": "  "}, hub_token_env="A")["weights.secrets"] == "fail"
    assert ids(hub, {"A": "x"}, hub_token_env="A")["weights.secrets"] == "ok"
    assert "weights.secrets" not in ids(hub)
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    assert ids(recipe(s3=S3), keys, s3_credentials_env=True)["weights.secrets"] == "ok"
    assert (
        ids(recipe(s3=S3), {"AWS_ACCESS_KEY_ID": "id"}, s3_credentials_env=True)["weights.secrets"] == "fail"
    )


def test_no_finding_shows_a_secret() -> None:
    found = sources.findings(recipe(huggingface=HF), settings(hub_token_env="A"), {"A": "hf_secret"})
    assert "hf_secret" not in str(found)


def test_a_site_with_no_source_of_this_model_fails_and_names_what_the_recipe_has() -> None:
    (found,) = sources.findings(recipe(modelscope=MS), settings(sources=["huggingface", "s3"]), {})
    assert (found.id, found.status) == ("weights.sources", "fail")
    assert found.expected is not None and "modelscope" in found.expected
    for data in (
        {"sources": ["path"], "model_path": "/x"},
        {"sources": ["peer"], "peer": "gpu1"},
        {"sources": ["s3"], "s3_bucket": "mine"},
    ):
        assert ids(recipe(modelscope=MS), **data)["weights.sources"] == "ok"


@pytest.mark.parametrize(
    ("manifest", "data", "status"),
    [
        ("manifests/rehearsal-cpu.sha256", {"hub_endpoint": "http://mirror.lan"}, None),
        (None, {"hub_endpoint": "http://mirror.lan"}, "fail"),
        (
            "manifests/rehearsal-cpu.sha256",
            {"hub_endpoint": "http://mirror.lan", "hub_token_file": "/t"},
            "fail",
        ),
        (None, {"hub_endpoint": "http://127.0.0.1:8080"}, None),
        (None, {"hub_endpoint": "https://mirror.example"}, None),
    ],
)
def test_a_mirror_without_tls_needs_a_manifest_and_no_token(
    manifest: str | None, data: dict[str, Any], status: str | None
) -> None:
    of = recipe(manifest, huggingface=HF)
    assert ids(of, **data).get("weights.tls") == status
    found = sources.source_of("huggingface", of, settings(**data))
    if status is None:
        source("huggingface", of, **data)
    else:
        with pytest.raises(ValueError, match="not https"):
            weight_sources.make_source(found, "/tmp/none")


def test_a_recipe_without_a_manifest_is_warned_of_and_a_moving_name_is_named() -> None:
    assert ids(recipe(huggingface=HF))["weights.manifest"] == "ok"
    pinned, moving = (
        next(f for f in sources.findings(recipe(None, huggingface=hub), settings(), {}) if "manifest" in f.id)
        for hub in (HF, {**HF, "revision": "main"})
    )
    assert (pinned.status, moving.status) == ("warn", "warn")
    assert moving.observed is not None and "acme/x@main" in moving.observed
    assert pinned.observed is not None and "move" not in pinned.observed
    assert pinned.fix == "rackwright manifest rehearsal-cpu --write"


def test_the_content_decides_whether_two_deliveries_are_the_same_not_the_source() -> None:
    def digest(of: Recipe, **data: Any) -> str:
        return sources.digest(of, settings(**data), "/models/x")

    one = recipe(huggingface=HF)
    assert digest(one) == digest(recipe(modelscope=MS))
    assert digest(one) == digest(one, sources=["path"], model_path="/y", hub_endpoint="https://m.example")
    assert digest(one) != sources.digest(one, settings(), "/models/y")
    bare = recipe(None, huggingface=HF)
    assert digest(bare) != digest(one)
    assert digest(bare) != digest(recipe(None, huggingface={**HF, "revision": "b" * 40}))
    assert digest(bare) != digest(bare, ignore=["*.py"])


def test_what_the_manifest_names_is_never_ignored(tmp_path: Path) -> None:
    assert "*.md" in sources.ignored(recipe(huggingface=HF), settings())
    assert "config.json" not in sources.ignored(recipe(huggingface=HF), settings(ignore=["config.json"]))
    named = tmp_path / "m.sha256"
    named.write_text(f"{'a' * 64}  README.md\n{'b' * 64}  config.json\n")
    assert "*.md" not in sources.ignored(recipe(str(named), huggingface=HF), settings())


def test_a_delivery_counts_as_verified_only_with_its_own_digest_and_untouched_files() -> None:
    receipt = Receipt("weights", "d1", 1.0, {"stat": "s1"})
    assert sources.verified(receipt, "d1", "s1")
    assert not sources.verified(receipt, "d2", "s1")
    assert not sources.verified(receipt, "d1", "s2")
    assert not sources.verified(receipt, "d1", None)
    assert not sources.verified(Receipt("weights", "d1", 1.0, {}), "d1", None)
    assert not sources.verified(None, "d1", "s1")


def test_tools_are_needed_for_hubs_and_storage_alone() -> None:
    hub = recipe(huggingface=HF)
    assert sources.need_clients(hub, settings())
    assert sources.need_clients(recipe(), settings(sources=["s3"], s3_bucket="b"))
    assert not sources.need_clients(hub, settings(sources=["path", "peer"], model_path="/x", peer="gpu1"))
    assert not sources.need_clients(load_recipe("rehearsal-cpu"), settings())
