"""Rules that the source tree keeps: who may import whom, where settings come from, what is documented."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import foredraft

ROOT = Path(__file__).parents[1] / "src" / "foredraft"
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# Records at the top: what all layers speak of.
RECORDS = {
    "config",
    "errors",
    "exactness",
    "logits_processor",
    "logprobs",
    "media",
    "outputs",
    "plan",
    "request",
    "sampling_params",
    "statistics",
    "stopping",
    "structured_output",
}
# What a module of each layer may import, besides its own layer: layers, or single modules of them.
ALLOWED = {
    "records": set(),
    "cache": {"records"},
    "scheduler": {"records", "cache"},
    "kernels": set(),
    "models": {"records", "cache.groups", "cache.storage", "kernels"},
    "sampling": {"records"},
    "speculation": {"records", "cache.storage", "models", "sampling"},
    "runner": {"records", "cache", "kernels", "models", "sampling", "speculation"},
    "engine": {"records", "cache", "kernels", "models", "runner", "sampling", "scheduler", "speculation"},
    "foredraft": {"records", "engine"},  # the package itself: its public names
    "bench": {
        "records",
        "cache.block_tables",
        "cache.groups",
        "cache.manager",
        "cache.storage",
        "engine",
        "foredraft",
        "kernels",
        "models",
        "scheduler",
        "speculation.drafter",
    },
    "server": {"records", "engine", "foredraft"},
    "training": {"records", "engine", "foredraft", "models"},
    "cli": {
        "records",
        "engine",
        "foredraft",
        "bench",
        "server",
        "training",
        "models.loader",
        "models.checkpoint_files",
    },
}
MAX_LINES = 400


def layer(module: str) -> str:
    """The layer of a module: records, or the subpackage it is in, or `foredraft` for the package itself."""
    if module == "foredraft":
        return "foredraft"
    first = module.split(".")[1]
    if first == "__main__":
        return "cli"
    return "records" if first in RECORDS else first


def imported_modules(module: str) -> Iterator[str]:
    """Foredraft's own modules that `module` imports, wherever in the file: functions and TYPE_CHECKING included."""
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if (found := name if name in MODULES else node.module) in MODULES:
                    yield str(found)


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    own = layer(module)
    for imported in imported_modules(module):
        names = {own, *ALLOWED[own]}
        assert layer(imported) in names or imported.removeprefix("foredraft.") in names, f"{module} imports {imported}"


def test_imports_have_no_cycle() -> None:
    # A name of the package itself (`from foredraft import LLM`) is resolved when it is used, so it is no edge here.
    graph = {module: set(imported_modules(module)) - {"foredraft"} for module in MODULES if module != "foredraft"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_reads_no_environment_variable(module: str) -> None:
    forbidden = {"environ", "environb", "getenv", "putenv"}
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in forbidden, f"{module}, line {node.lineno}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            assert forbidden.isdisjoint(alias.name for alias in node.names), f"{module}, line {node.lineno}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_small_and_named_after_what_it_holds(module: str) -> None:
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    assert module.rpartition(".")[2] not in {"common", "helpers", "misc", "util", "utils"}


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_and_classes_have_a_docstring(module: str) -> None:
    tree = parse(module)
    assert ast.get_docstring(tree), f"{module} has none"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}.{node.name} has none"


def test_public_names_can_be_imported_and_are_all_listed() -> None:
    for name in foredraft.__all__:
        assert getattr(foredraft, name) is not None
    submodules = {module.split(".")[1] for module in MODULES if "." in module}
    public = {name for name in vars(foredraft) if not name.startswith("_")} - submodules
    assert public - {"TYPE_CHECKING"} == set(foredraft.__all__) - {"__version__"}


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = foredraft.Engine  # type: ignore[attr-defined]
