"""The dashboard and the documentation speak of the metrics that there are, and of all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from foredraft.server.metrics import PREFIX, Metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "foredraft.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
CHARTS = [panel for panel in PANELS if panel["type"] != "row"]
NAME = r"(?<![\w:])(?:foredraft:|process_|python_)\w+"


@cache
def families() -> tuple[Metric, ...]:
    body, _ = Metrics("tiny", num_positions=1).exposition()
    return tuple(text_string_to_metric_families(body.decode()))


@cache
def labels_by_sample() -> dict[str, set[str]]:
    """Labels of each sample that is exposed, those of all processes too; a histogram's are _bucket, _sum and _count."""
    return {sample.name: set(sample.labels) for family in families() for sample in family.samples}


def own() -> list[Metric]:
    return [family for family in families() if family.name.startswith(PREFIX)]


def shown_name(family: Metric) -> str:
    """A counter's name as it is written in an expression; the parser leaves `_total` out."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def expressions() -> Iterator[tuple[str, str]]:
    for panel in CHARTS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def recipes() -> list[str]:
    """The PromQL blocks of the page, each with one expression."""
    return re.findall(r"^```promql\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


# -- the dashboard ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expression", [*(expr for _, expr in expressions()), *recipes()])
def test_expressions_name_metrics_and_labels_that_exist(expression: str) -> None:
    names = re.findall(NAME, expression)
    assert names
    for name in names:
        assert name in labels_by_sample(), name
    exposed = {label for name in names for label in labels_by_sample()[name]} | {"instance", "job"}
    for selector in re.findall(r"\{([^{}]*)\}", expression):
        assert {pair.split("=")[0].strip(" !~") for pair in selector.split(",")} <= exposed, selector
    for grouping in re.findall(r"\b(?:by|ignoring|on) \(([^()]*)\)", expression):
        assert {label.strip() for label in grouping.split(",")} <= exposed, grouping
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)


@pytest.mark.parametrize("expression", [*(expr for _, expr in expressions()), *recipes()])
def test_counters_are_read_as_rates_and_gauges_as_they_are(expression: str) -> None:
    gauges = {family.name for family in families() if family.type == "gauge"}
    for match in re.finditer(rf"(rate\(|increase\()?({NAME})(\{{[^{{}}]*\}})?(\[)?", expression):
        is_rate = match[1] is not None and match[4] is not None
        assert is_rate == (match[2] not in gauges), match[0]


def test_every_expression_follows_the_chosen_models() -> None:
    for title, expression in expressions():
        for name, selector in re.findall(rf"({NAME})(\{{[^{{}}]*\}})?", expression):
            if "model_name" in labels_by_sample()[name]:
                assert 'model_name=~"$model_name"' in selector, title


def test_every_metric_is_shown() -> None:
    shown = {name for _, expr in expressions() for name in re.findall(NAME, expr)}
    for family in own():
        assert shown & {sample.name for sample in family.samples}, family.name


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24, panel["title"]
        assert place["h"] > 0, panel["title"]
    for one, other in combinations(PANELS, 2):
        a, b = one["gridPos"], other["gridPos"]
        is_apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert is_apart, (one["title"], other["title"])


def test_panels_are_whole() -> None:
    for panel in CHARTS:
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(refs) == len(set(refs))
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= {
                label.strip() for by in re.findall(r"by \(([^()]*)\)", target["expr"]) for label in by.split(",")
            }, panel["title"]
    titles = [panel["title"] for panel in CHARTS]
    assert DASHBOARD["schemaVersion"] >= 39
    assert {panel["title"] for panel in PANELS} - set(titles) >= {"Traffic", "Latency", "Cache", "Speculation"}


def test_variables_are_those_that_panels_use() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "model_name"}
    assert variables["datasource"]["type"] == "datasource"
    used = {name for _, expr in expressions() for name in re.findall(r"\$(\w+)", expr)}
    assert used == {"model_name", "__rate_interval"}
    (source,) = re.findall(NAME, variables["model_name"]["definition"])
    assert "model_name" in labels_by_sample()[source]


# -- docs/metrics.md -------------------------------------------------------------------------------------------------


def reference_rows() -> list[list[str]]:
    rows = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith(f"| `{PREFIX}")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_reference_lists_exactly_the_metrics_that_exist() -> None:
    expected = []
    for family in own():
        labels = set().union(*(sample.labels for sample in family.samples)) - {"le", "model_name"}
        label = ", ".join(f"`{name}`" for name in sorted(labels))
        expected.append([f"`{shown_name(family)}`", family.type, label, family.documentation])
    assert [[name, kind, labels, meaning] for name, kind, labels, _, meaning in reference_rows()] == expected


def test_units_of_the_reference_are_those_of_the_names() -> None:
    for name, _, _, unit, _ in reference_rows():
        assert unit, name
        assert (unit == "seconds") == ("_seconds" in name), name
        if "tokens" in name and "per_output_token" not in name:
            assert unit == "tokens", name


def test_the_page_names_no_metric_that_does_not_exist() -> None:
    known = labels_by_sample().keys() | {shown_name(family) for family in families()}
    for name in re.findall(NAME, PAGE):
        assert name in known, name


def test_the_scrape_example_is_whole() -> None:
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    assert "metrics_path: /metrics\n" in text
    assert '["127.0.0.1:8000"]' in text
    assert "deploy/prometheus/prometheus.yml" in PAGE
    assert "deploy/grafana/foredraft.json" in PAGE
