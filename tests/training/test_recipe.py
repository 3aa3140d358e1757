"""Recipes: what is refused, what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import ConfigError
from foredraft.training.recipe import STAGES, Recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": 0}, "depths must be an integer of at least 1, not 0"),
        ({"depths": 8, "row_length": 17}, "row_length must be an integer of at least 18"),
        ({"position_share": 0.0}, "position_share must be a number from 1e-06 to 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number from 0 to 100, not nan"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"targets": "easy"}, "targets must be one of soft, hard, not 'easy'"),
        ({"optimizer": "sgd"}, "optimizer must be one of muon, adamw"),
        ({"storage": "int4"}, "storage must be one of int8, bfloat16, float32"),
        ({"num_steps": 5, "train_seconds": 9.0}, "give one"),
        ({"min_temperature": 0.9, "max_temperature": 0.5}, "min_temperature=0.9 is above max_temperature=0.5"),
        ({"targets": "hard", "overlap_weight": 0.5}, "overlap_weight needs targets=soft"),
        ({"prompts": "turns.csv"}, "must end in .jsonl"),
        ({"patience": 0}, "patience must be an integer of at least 1"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**changes)


def test_a_recipe_is_read_as_it_was_saved(tmp_path: Path) -> None:
    recipe = Recipe(depths=3, overlap_weight=0.5, num_steps=7)
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == recipe
    (tmp_path / "recipe.json").write_text('{"depth": 3}')
    with pytest.raises(ConfigError, match="unknown setting depth"):
        Recipe.load(tmp_path / "recipe.json")


def test_every_setting_belongs_to_one_stage() -> None:
    names = [name for stage in STAGES for name in Recipe().of_stage(stage)]
    assert sorted(names) == sorted(Recipe.__dataclass_fields__)
