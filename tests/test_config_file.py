"""A value comes from the flag, else the file, else the recipe, else the default; nothing is guessed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import TrainConfig
from pipeline.config_file import merged, read_settings
from pipeline.training_recipes import RECIPES
from shims.errors import UsageError

NEEDED = {"data": Path("d"), "vocab": Path("v"), "model": "m", "output_dir": Path("o")}


def of(given: dict[str, Any] | None = None, file: Path | None = None, recipe: str | None = None) -> TrainConfig:
    return merged(TrainConfig, {**NEEDED, **(given or {})}, file, recipe, RECIPES)


def test_flags_come_before_the_file_before_the_recipe_before_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('max-seq-len = 512\nlr = 1\nscheduler = "none"\n')
    found = of({"lr": 0.5}, file, "small")
    assert (found.lr, found.max_seq_len, found.scheduler) == (0.5, 512, "none")
    assert found.epochs == RECIPES["small"]["epochs"] and found.seed == 0
    assert of({}, file).lr == 1.0 and isinstance(of({}, file).lr, float)


def test_yaml_says_the_same(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "train.yaml"
    file.write_text("recipe: smoke\nlr: 1e-4\ninit_from: /drafts/a\nfsdp: true\nwarmup-steps: null\n")
    found = of({}, file)
    assert (found.lr, found.init_from, found.fsdp, found.warmup_steps) == (1e-4, Path("/drafts/a"), True, None)
    assert found.max_steps == RECIPES["smoke"]["max_steps"]


def test_a_name_twice_is_refused_in_yaml_as_in_toml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    for name, text in (("a.yaml", "epochs: 1\nepochs: 2\n"), ("a.toml", "epochs = 1\nepochs = 2\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=r"epochs|overwrite"):
            of({}, tmp_path / name)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("epoch = 3", "epoch"), ("epochs = true", "int"), ('epochs = "3"', "int"), ("lr = true", "float"),
        ("lr = [1]", "tables or lists"), ("epochs = ", "readable"), ('recipe = "huge"', "kimi-k2.5"),
        ("model = 3", "str"), ('init-from = ""', "an empty text"), ("max-steps = 1\nmax_steps = 2", "each name once"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "train.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=told):
        of({}, file)


def test_what_an_editor_puts_before_the_text_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text("epochs = 7", encoding="utf-8-sig")
    assert of({}, file).epochs == 7


def test_what_is_needed_is_named() -> None:
    with pytest.raises(UsageError, match="--data, --vocab, --model, --output-dir"):
        merged(TrainConfig, {}, None, "smoke", RECIPES)


def test_only_known_kinds_of_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.toml, \.yaml"):
        read_settings(tmp_path / "train.json")
    with pytest.raises(UsageError, match="FileNotFoundError"):
        read_settings(tmp_path / "train.toml")


def test_each_recipe_is_made_of_settings() -> None:
    names = {field.name for field in fields(TrainConfig)}
    for name, recipe in RECIPES.items():
        assert recipe.keys() <= names, name
        assert of({}, None, name)


def test_the_command_line_hands_on_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    import pipeline.train
    from pipeline.__main__ import app

    seen: list[TrainConfig] = []

    def stop(config: TrainConfig) -> None:
        seen.append(config)
        raise UsageError("test", "nothing more", "a configuration", "stop")

    monkeypatch.setattr(pipeline.train, "train", stop)
    file = tmp_path / "train.toml"
    file.write_text('data = "d"\nvocab = "v"\nmodel = "m"\noutput-dir = "o"\nepochs = 7\nseed = 5\n')
    CliRunner().invoke(app, ["train", "--config", str(file), "--recipe=small", "--epochs=3", "--no-tensorboard"])
    assert (seen[0].data, seen[0].epochs, seen[0].seed, seen[0].patience) == (Path("d"), 3, 5, 3)
    assert seen[0].tensorboard is False and seen[0].output_dir == Path("o")
    flags = {parameter.name for parameter in _parameters(app)} - {"context", "config", "recipe", "help"}
    assert flags == {field.name for field in fields(TrainConfig)}


def _parameters(app: Any) -> list[Any]:
    from typer.main import get_command

    return list(get_command(app).commands["train"].params)  # type: ignore[attr-defined]
