"""The table of families: every class in it exists, and none is imported for a model that does not need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from foredraft.models.families import registry
from foredraft.models.families.family import Family
from foredraft.models.families.registry import FAMILIES, ORDINARY, family_of

TYPES = [(name, model_type) for name, types in FAMILIES.items() for model_type in types]


@pytest.mark.parametrize(("name", "model_type"), TYPES)
def test_every_type_has_its_family(name: str, model_type: str) -> None:
    family = family_of(AutoConfig.for_model(model_type))
    assert f"{type(family).__module__.rsplit('.', 1)[1]}.{type(family).__name__}" == name
    assert type(family).__doc__


def test_every_file_is_in_the_table() -> None:
    files = {path.stem for path in Path(registry.__file__).parent.glob("*.py")} - {"__init__", "family", "registry"}
    assert files == {name.split(".")[0] for name in FAMILIES}


def test_others_are_ordinary() -> None:
    assert family_of(AutoConfig.for_model("llama")) is ORDINARY
    assert type(ORDINARY) is Family


def test_families_are_imported_when_they_are_needed() -> None:
    """Each brings a file of transformers' models with it, which others need not wait for."""
    code = (
        "import sys, foredraft.engine.build\n"
        "from transformers import LlamaConfig\n"
        "foredraft.models.target.family_of(LlamaConfig())\n"
        "print(*(name for name in sys.modules if name.startswith('foredraft.models.families.')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.rsplit(".", 1)[1] for name in found} == {"family", "registry"}
