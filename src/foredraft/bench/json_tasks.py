"""Prompts that ask for JSON, and the schemas that the answers must fit. Everything is bounded, so that answers end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonTask:
    """A prompt, and the JSON schema of the object that it asks for."""

    name: str
    prompt: str
    schema: dict[str, Any]


def json_tasks(count: int) -> list[JsonTask]:
    """The first `count` of them; MAX_TASKS at most. Kinds take turns."""
    by_kind = [
        [_task(name, request, schema, subject) for subject in subjects] for name, request, schema, subjects in _KINDS
    ]
    return list(itertools.chain.from_iterable(zip(*by_kind, strict=True)))[:count]


def _task(name: str, request: str, schema: dict[str, Any], subject: str) -> JsonTask:
    fields = ", ".join(schema["properties"])
    return JsonTask(f"{name}: {subject}", f"{request.format(subject)} as JSON with the fields {fields}.", schema)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _text(length: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": length}


def _integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _array(items: dict[str, Any], low: int, high: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


_ANIMAL = _object(
    name=_text(40),
    kind={"enum": ["mammal", "bird", "reptile", "amphibian", "fish", "insect"]},
    legs=_integer(0, 8),
    diet={"enum": ["plants", "animals", "both"]},
    habitats=_array(_text(30), 1, 3),
    description=_text(160),
)
_CITY = _object(
    city=_text(40),
    country=_text(40),
    population=_integer(1, 50_000_000),
    is_capital={"type": "boolean"},
    sights=_array(_object(name=_text(50), kind={"enum": ["museum", "park", "building", "square", "other"]}), 2, 4),
)
_RECIPE = _object(
    title=_text(60),
    servings=_integer(1, 12),
    ingredients=_array(
        _object(name=_text(30), amount=_integer(1, 1000), unit={"enum": ["g", "ml", "pieces", "spoons"]}), 3, 5
    ),
    steps=_array(_text(100), 2, 4),
)
_PERSON = _object(
    name=_object(first=_text(20), last=_text(30)),
    born=_integer(1000, 2000),
    field={"enum": ["physics", "mathematics", "chemistry", "biology", "computing", "medicine"]},
    known_for=_array(_text(80), 1, 3),
    summary=_text(200),
)
_CALL = _object(
    function={"enum": ["add_event", "remove_event", "list_events"]},
    arguments=_object(
        title=_text(50),
        day={"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]},
        hour=_integer(0, 23),
        minutes=_integer(5, 240),
        guests=_array(_text(20), 0, 3),
    ),
)

_KINDS: tuple[tuple[str, str, dict[str, Any], tuple[str, ...]], ...] = (
    (
        "animal",
        "Describe the animal {}",
        _ANIMAL,
        ("red fox", "emperor penguin", "honey bee", "blue whale", "chameleon", "barn owl", "salmon", "tree frog"),
    ),
    (
        "city",
        "Describe the city {}",
        _CITY,
        ("Paris", "Tokyo", "Nairobi", "Lima", "Oslo", "Istanbul", "Sydney", "Montreal"),
    ),
    (
        "recipe",
        "Write a recipe for {}",
        _RECIPE,
        ("pancakes", "tomato soup", "apple pie", "fried rice", "hummus", "an omelette", "lentil curry", "banana bread"),
    ),
    (
        "person",
        "Introduce the scientist {}",
        _PERSON,
        (
            "Marie Curie",
            "Isaac Newton",
            "Ada Lovelace",
            "Charles Darwin",
            "Emmy Noether",
            "Alan Turing",
            "Louis Pasteur",
            "Galileo Galilei",
        ),
    ),
    (
        "function call",
        'Turn the request "{}" into a function call',
        _CALL,
        (
            "Lunch with Anna on Tuesday at noon, one hour",
            "Cancel the dentist on Friday at 9",
            "What is on my calendar on Monday?",
            "Team meeting on Wednesday at 14:00 with Ben and Carla, 45 minutes",
            "Piano lesson every Thursday at 17:00",
            "Remove the yoga class on Sunday",
            "Dinner with Dan on Saturday evening at eight",
            "Call the bank on Monday morning, 10 minutes",
        ),
    ),
)

MAX_TASKS = sum(len(subjects) for *_, subjects in _KINDS)
