"""The documentation says what the code does: worked examples are replayed, figures computed, names looked up."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, get_args

import pytest
import tiny_models
import torch
from scripted import ScriptedDrafter, greedy_sequence, scripted_engine
from tiny_models import tiny_glm4_moe, tiny_llama
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from typer.main import get_command

import foredraft
from foredraft import LLM
from foredraft.cli.app import app
from foredraft.config import CudaGraphs, EngineConfig, Execution
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.exactness import ExactRows
from foredraft.kernels.decode_ops import DecodeKernels
from foredraft.kernels.decode_state import RING_SIZE
from foredraft.kernels.ops import Kernels
from foredraft.kernels.triton.matmul_config import MAX_ROWS
from foredraft.models.attention import PagedAttention
from foredraft.models.fused_model import _LOOSE, _NUM_PROBE_ROWS, _TOLERANCE
from foredraft.models.loader import LoadedModel, inspect_checkpoint, load_checkpoint
from foredraft.models.rotary import MAX_TABLE_POSITIONS
from foredraft.models.target import TargetModel
from foredraft.request import Request
from foredraft.runner.memory import CPU_CACHE_BYTES
from foredraft.runner.resident.shape import MAX_WINDOW, WINDOW_SIZES, lane_sizes
from foredraft.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]
PAGES = {
    path.name: path.read_text(encoding="utf-8") for path in [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]
}
MTP = PAGES["mtp.md"]

Table = list[list[str]]


# -- the worked examples ---------------------------------------------------------------------------------------------
#
# A comment `replay` in the page begins an example and says how to run it: `steps=K4,K0a1` is one step that drafts four
# tokens, and one that verifies them, accepts one and drafts nothing. The comments `reads`, `states` and `passes` say
# what the table after them shows.


@dataclass(frozen=True)
class Step:
    """What happened in one step of the engine: where it ended, and its passes."""

    num_tokens: int
    num_computed_tokens: int
    num_exact_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...]
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Pass:
    """One pass: for each of its rows the position and id of the token read, and the slot its KV went to."""

    first_row: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """One example of the page: how to run it, and its tables, each with its kind and settings."""

    settings: dict[str, str]
    tables: tuple[tuple[str, dict[str, str], Table], ...]


def examples() -> list[Example]:
    """All examples of docs/mtp.md."""
    found: list[tuple[dict[str, str], list[tuple[str, dict[str, str], Table]]]] = []
    for match in re.finditer(r"<!-- (\w+):? ?(.*?) ?-->", MTP):
        settings = dict(word.split("=", 1) for word in match[2].split())
        if match[1] == "replay":
            found.append((settings, []))
        else:
            found[-1][1].append((match[1], settings, table_after(MTP, match.end())))
    return [Example(settings, tuple(tables)) for settings, tables in found]


def table_after(text: str, offset: int) -> Table:
    """The cells of the next table, its header first."""
    lines = text[offset:].lstrip().splitlines()
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert len(rows) > 2
    return [rows[0], *rows[2:]]


EXAMPLES = examples()
IDS = ["rejection", "chunks", "depth", "chained"]


@cache
def model(num_modules: int) -> LoadedModel:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        path = tiny_glm4_moe(path) if num_modules == 1 else tiny_llama(path, num_modules=num_modules)
        return load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))


def replay(example: Example) -> list[Step]:
    """Run the example on a tiny model whose drafts are right as far as it says."""
    settings = example.settings
    script = [re.fullmatch(r"(?:K(\d))?(?:a(\d))?", step) for step in settings["steps"].split(",")]
    depths, accepted, depth = [], [], 0
    for match in script:
        assert match is not None
        depth = int(match[1] or depth)
        depths.append(depth)
        accepted.append(int(match[2] or 0))
    prompt = [(7 * index + 3) % 64 for index in range(int(settings["prompt"]))]
    config = EngineConfig(
        num_speculative_tokens=max(depths),
        block_size=4,
        num_blocks=32,
        max_num_seqs=1,
        max_num_batched_tokens=int(settings["budget"]),
    )
    loaded = model(int(settings["modules"]))
    engine, drafter = scripted_engine(loaded, config)
    plain = build_engine(loaded, EngineConfig(num_speculative_tokens=0, num_blocks=32, max_num_seqs=1))
    drafter.continuations["a"] = greedy_sequence(plain, prompt, 40)
    request = engine.add_request("a", prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    return [
        one_step(engine, drafter, request, depth, num_right) for depth, num_right in zip(depths, [*accepted[1:], 0])
    ]


def one_step(engine: Engine, drafter: ScriptedDrafter, request: Request, depth: int, num_right: int) -> Step:
    engine.set_num_speculative_tokens("a", depth)
    drafter.num_right["a"] = num_right
    passes: list[Pass] = []
    modules = drafter.modules
    forward = modules.forward

    def watch(module: int, token_ids: Tensor, positions: Tensor, hidden: Tensor, paged: PagedAttention) -> Tensor:
        # A single module that drafts again sits one position after its row, as in its first pass.
        first_row = int(positions[0]) - (1 if modules.num_modules == 1 else module + 1)
        passes.append(
            Pass(first_row, *(tuple(tensor.tolist()) for tensor in (positions, token_ids, paged.rows[module].slots)))
        )
        return forward(module, token_ids, positions, hidden, paged)

    modules.forward = watch  # type: ignore[method-assign]
    try:
        engine.step()
    finally:
        modules.forward = forward  # type: ignore[method-assign]
    check_slots(engine, passes)
    return Step(
        request.num_tokens,
        request.num_computed_tokens,
        request.exact.num_exact_rows,
        tuple(request.token_ids),
        request.draft_token_ids,
        tuple(passes),
    )


def check_slots(engine: Engine, passes: Sequence[Pass]) -> None:
    """What is not written to the reserved slot is written to the row's own."""
    storage = engine.runner.storage
    blocks = engine.cache.block_tables("a")[storage.layout.group_of_module[0]]
    for one in passes:
        own = storage.slots(blocks, one.first_row + len(one.slots)).tolist()[one.first_row :]
        assert all(slot in (0, right) for slot, right in zip(one.slots, own, strict=True))


def span(rows: Sequence[int]) -> str:
    """Rows as the page writes them: 4..7, 10, none."""
    if not rows:
        return "none"
    assert list(rows) == list(range(rows[0], rows[-1] + 1))
    return f"{rows[0]}..{rows[-1]}" if len(rows) > 1 else f"{rows[0]}"


def name_of(step: Step, position: int, token_id: int) -> str:
    """A token as the page writes it: t7, or d9 for a draft. It must be the one that the request holds there."""
    is_draft = position >= step.num_tokens
    assert token_id == (*step.token_ids, *step.draft_token_ids)[position]
    return f"{'d' if is_draft else 't'}{position}"


def pass_table(step: Step) -> Table:
    rows = [["pass", "rows", "reads", "KV stored for", "reserved block", "makes"]]
    for index, one in enumerate(step.passes):
        numbers = range(one.first_row, one.first_row + len(one.positions))
        reads = " ".join(name_of(step, p, t) for p, t in zip(one.positions, one.token_ids))
        stored = [row for row, slot in zip(numbers, one.slots) if slot]
        reserved = [row for row, slot in zip(numbers, one.slots) if not slot]
        makes = f"d{step.num_tokens + index}" if index < len(step.draft_token_ids) else "none"
        rows.append([f"{index + 1}", span(numbers), reads, span(stored), span(reserved), makes])
    return rows


def reads_table(step: Step, rows: str) -> Table:
    first, last = (int(row) for row in rows.split(".."))
    table = [["", *(f"row {row}" for row in range(first, last + 1))]]
    for index, one in enumerate(step.passes):
        names = [name_of(step, p, t) for p, t in zip(one.positions, one.token_ids)]
        table.append([f"module {index + 1}", *names[first - one.first_row : last + 1 - one.first_row]])
    return table


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_examples_are_what_the_engine_does(example: Example) -> None:
    steps = replay(example)
    assert any(kind == "passes" for kind, _, _ in example.tables)
    for kind, settings, table in example.tables:
        if kind == "states":
            ends = {(step.num_tokens, step.num_computed_tokens, step.num_exact_rows) for step in steps}
            stated = [(int(n), int(c), tuple(int(count) for count in counts)) for _, n, c, *counts in table[1:]]
            # A verification that is followed by drafts is the middle of a step: its counts are seen by the rule only.
            is_seen = [i for i in range(len(stated)) if i + 1 == len(stated) or stated[i][:2] != stated[i + 1][:2]]
            assert [stated[i] for i in is_seen] == [
                (s.num_tokens, s.num_computed_tokens, s.num_exact_rows) for s in steps
            ]
            assert ends <= set(stated)
        else:
            step = steps[int(settings["step"]) - 1]
            assert table == (pass_table(step) if kind == "passes" else reads_table(step, settings["rows"]))


@pytest.mark.parametrize("example", EXAMPLES[:3], ids=IDS[:3])
def test_examples_follow_the_rule(example: Example) -> None:
    """The `states` tables, line by line, from `ExactRows` alone."""
    (table,) = (table for kind, _, table in example.tables if kind == "states")
    exact = ExactRows.none(len(table[0]) - 3)
    num_tokens = num_computed = 0
    for event, n, c, *counts in table[1:]:
        if match := re.fullmatch(r"draft d(\d+)\.\.d(\d+)", event):
            assert int(match[1]) == int(n)
            exact = exact.after_draft(int(n), int(c), int(match[2]) - int(match[1]) + 1)
        elif match := re.fullmatch(r"verify: (\d+) accepted", event):
            assert (int(n), int(c)) == (num_tokens + int(match[1]) + 1, num_computed + int(match[1]) + 1)
            exact = exact.after_verify(int(match[1]))
        elif match := re.fullmatch(r"rows (\d+)\.\.(\d+)", event):
            assert (int(match[1]), int(match[2]) + 1) == (num_computed, int(c))
            exact = exact.after_rows(int(n), int(c), len(counts))
        else:
            assert event == "no draft"
        num_tokens, num_computed = int(n), int(c)
        assert exact.num_exact_rows == tuple(int(count) for count in counts), event


@pytest.mark.parametrize("num_accepted", range(5))
def test_the_window_has_the_size_that_is_stated(num_accepted: int) -> None:
    assert "these are max(K, a+1) rows" in MTP
    steps = replay(Example({"modules": "4", "prompt": "8", "budget": "64", "steps": f"K4,K4a{num_accepted}"}, ()))
    assert {len(one.positions) for one in steps[1].passes} == {max(4, num_accepted + 1)}


def test_modules_saved_as_shown_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path / "my-checkpoint", num_modules=0)
    (code,) = re.findall(r"^```python\n(.*?)^```$", MTP, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/mtp.md", "exec"), names)
    assert inspect_checkpoint(path).num_mtp_modules == 3
    loaded = load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.mtp is not None
    for name, tensor in names["modules"].layers.state_dict().items():
        assert torch.equal(loaded.mtp.layers.state_dict()[name], tensor)
    untouched = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(untouched[name], tensor) for name, tensor in names["target"].state_dict().items())


# -- figures ---------------------------------------------------------------------------------------------------------


def test_memory_figures(builtin_llm: LLM) -> None:
    page = PAGES["architecture.md"]
    layout = builtin_llm.engine.runner.storage.layout
    figures = {line[0]: [int(cell.replace(",", "")) for cell in line[1:]] for line in memory_table(page)}
    per_row = {
        "target keys and values: 30 x 2 x 3 x 64": layout.bytes_per_token(0) - 4 * layout.hidden_size,
        "h0: 576": 4 * layout.hidden_size,
        "modules: 8 x 2 x 3 x 64": layout.bytes_per_token(1),
        "bytes per token": layout.bytes_per_token(),
    }
    assert figures == {name: [num_bytes, num_bytes // 2] for name, num_bytes in per_row.items()}
    num_blocks = CPU_CACHE_BYTES // (layout.bytes_per_token() * EngineConfig().block_size)
    assert f"{num_blocks:,}" in page
    assert f"{(num_blocks - 1) * EngineConfig().block_size:,} tokens" in page
    printed = builtin_llm.cache_size.lines()
    assert "\n".join(f"    {line}" for line in printed) in page


def memory_table(page: str) -> Table:
    start = page.index("| | float32 (4 bytes)")
    return table_after(page, start)[1:]


def test_sizes_of_the_builtin_model(builtin_llm: LLM) -> None:
    info = builtin_llm.info
    for number in (info.num_parameters, info.num_mtp_parameters):
        assert f"{number / 1e6:.1f} M" in PAGES["models.md"]


# -- the GPU ---------------------------------------------------------------------------------------------------------


def rows_after(page: str, text: str) -> list[list[str]]:
    """The cells of the first table after a text, its header left out."""
    return table_after(PAGES[page], PAGES[page].index("\n|", PAGES[page].index(text)))[1:]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_kernel_is_listed_with_both_of_its_files() -> None:
    table = rows_after("gpu.md", "## Kernels")
    listed = [name for cell, *_ in table for name in spans(cell)]
    protocols = [name for kind in (Kernels, DecodeKernels) for name in vars(kind) if not name.startswith("_")]
    assert sorted(listed) == sorted([*protocols, "int8_argmax", "int8_logits"])
    for cell, _, *files in table:
        for file in files:
            (path,) = spans(file)
            module = import_module("foredraft." + path.removesuffix(".py").replace("/", "."))
            assert all(callable(getattr(module, name)) for name in spans(cell)), path


def test_how_steps_run_is_all_said() -> None:
    stated = [name for cell, *_ in rows_after("gpu.md", "## Execution") for name in spans(cell)]
    assert sorted(stated) == sorted({*get_args(Execution)} - {"auto"})
    listed = set(re.findall(r"^- `([\w-]+)`: ", PAGES["gpu.md"], flags=re.MULTILINE))
    assert listed == set(get_args(CudaGraphs))


def test_the_sizes_that_are_stated_for_a_gpu() -> None:
    page = PAGES["gpu.md"].replace("\n", " ")
    sizes = lane_sizes(64)
    assert "1, 2, 4, 8, 16, then multiples of 8, and `max_num_seqs`" in page
    assert sizes == (1, 2, 4, 8, 16, *range(24, 64, 8), 64)
    assert f"or {WINDOW_SIZES[0]}, {WINDOW_SIZES[1]} or {WINDOW_SIZES[2]} where one lane has more" in page
    assert f"more than {MAX_WINDOW} rows" in page
    assert f"the last {RING_SIZE} tokens" in page
    assert f"Up to {MAX_ROWS} rows" in page
    stated = " in float32, ".join(f"{_TOLERANCE[dtype]:.0e}" for dtype in (torch.float32, torch.float16))
    stated = f"{stated} in float16, {_TOLERANCE[torch.bfloat16]:.0e} in bfloat16".replace("e-0", "e-")
    assert stated.replace(" in float32,", " of their length in float32,") in page
    assert _LOOSE == 0.25
    assert _NUM_PROBE_ROWS == 5
    assert MAX_TABLE_POSITIONS == 2**20


def test_the_number_of_graphs_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = re.search(r"(\d+) graphs for `max_num_seqs` = (\d+) with modules, (\d+) without", PAGES["gpu.md"])
    assert stated is not None
    most = int(stated[2])
    for depth, count in ((2, int(stated[1])), (0, int(stated[3]))):
        config = EngineConfig(
            num_speculative_tokens=depth,
            execution="synchronous",
            num_blocks=32,
            max_num_seqs=most,
            max_num_batched_tokens=most * 3,
        )
        resident = build_engine(model(4), config).runner.resident
        assert resident is not None
        keys: set[Hashable] = set()
        monkeypatch.setattr(resident, "_lane_sizes", lane_sizes(most))
        monkeypatch.setattr(resident.graphs, "run", lambda key, _, seen=keys: seen.add(key))
        resident.capture()
        assert len(keys) == count


FUSED = {"yes": (True, True), "all but the experts": (True, False), "no": (False, False)}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "GLM-4 MoE", "Mellum"])
def test_which_architectures_are_fused(tmp_path: Path, kind: str) -> None:
    table = {name: FUSED[cell] for name, _, _, cell, _ in rows_after("models.md", "weights of them were at hand.")}
    build = getattr(tiny_models, "tiny_" + kind.lower().replace("-", "").replace(" ", "_"))
    loaded = load_checkpoint(build(tmp_path / "model"), dtype=torch.float32, device=torch.device("cpu"))
    target = TargetModel(loaded.target)
    target.fuse(64)
    layers = target.fused._layers if target.fused is not None else []
    assert (bool(layers), bool(layers) and all(layer.gate_up is not None for layer in layers)) == table[kind]


def test_commands_exist_with_their_options() -> None:
    root: Any = get_command(app)
    seen = 0
    for page in ("gpu.md", "models.md"):
        lines = [*shell(page), *(code for code in code_spans(page) if re.match(r"(foredraft|python -m) ", code))]
        for words in (shlex.split(line, comments=True) for line in lines):
            if words[:2] == ["python", "-m"]:
                source = Path(str(find_spec(words[2]).origin)).read_text(encoding="utf-8")  # type: ignore[union-attr]
                assert '__name__ == "__main__"' in source
                assert all(f'"{word}"' in source for word in words if word.startswith("--"))
            elif words[0] == "foredraft":
                command, names = root, words[1:]
                while names and names[0] in getattr(command, "commands", {}):
                    command = command.commands[names.pop(0)]
                assert not getattr(command, "commands", {}) or len(words) == 2, words
                flags = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
                assert {word for word in names if word.startswith("-")} <= flags, words
            seen += 1
    assert seen > 8


# -- names, links and messages ---------------------------------------------------------------------------------------


def code_spans(page: str) -> Iterator[str]:
    """What stands between backticks, fenced blocks left out."""
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", prose)


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    base = ROOT if page == "CONTRIBUTING.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        path = base / file if file else base / page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path), link


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    """Paths from the root of the repository or from src/foredraft, with the test that follows `::`."""
    pattern = r"(?<![\w/.~-])((?:[\w-]+/)*[\w.-]+\.(?:py|md|jsonl)|(?:src|tests|docs|benchmarks)/[\w./-]*)(?:::(\w+))?"
    for name, test in re.findall(pattern, re.sub(r"\]\([^)]*\)|https?:\S+", "", PAGES[page])):
        found = [
            path for path in (ROOT / name, ROOT / "src" / "foredraft" / name, ROOT / "docs" / name) if path.exists()
        ]
        assert found, name
        assert not test or f"def {test}(" in found[0].read_text(encoding="utf-8"), test


@cache
def sources() -> str:
    """All text in which a documented name may be defined."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file != Path(__file__))


@cache
def classes() -> dict[str, type]:
    """All classes that Foredraft defines or uses from transformers, by name."""
    found: dict[str, type] = {"MtpCache": MtpCache}
    for module in walk_packages(foredraft.__path__, "foredraft."):
        if not module.name.endswith("__main__"):
            found |= {
                name: value for name, value in vars(import_module(module.name)).items() if isinstance(value, type)
            }
    return found


def has_member(owner: type, name: str) -> bool:
    names = {field.name for field in fields(owner)} if is_dataclass(owner) else set()
    return hasattr(owner, name) or name in names


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"benchmarks.md"}))
def test_names_exist(page: str) -> None:
    """Names in backticks: `Class.member` is looked up, any other identifier must occur in the sources."""
    for code in code_spans(page):
        if match := re.fullmatch(r"([A-Z]\w+)\.(\w+)(?:\(.*)?", code):
            assert match[1] in classes(), code
            assert has_member(classes()[match[1]], match[2]), code
        elif re.fullmatch(r"_?[A-Za-z]\w{3,}", code):
            assert code in classes() or re.search(rf"\b{code}\b", sources()), code


def test_messages_are_those_of_the_code() -> None:
    text = re.sub(r'"\s*\n\s*f?"', "", sources())
    for line in PAGES["models.md"].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        is_message = len(cells) == 2 and re.fullmatch(r"`[^`]+`", cells[1]) and " " in cells[1]
        for part in re.split(r"…", cells[1].strip("`")) if is_message else ():
            assert part.strip(" ():,=") in text, part


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str) -> None:
    assert len(PAGES[page].splitlines()) < 250


def test_make_has_the_commands() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = re.findall(
        r"\bmake ([a-z-]+)\b", "\n".join(code for page in PAGES for code in (*code_spans(page), *shell(page)))
    )
    assert named
    assert set(named) <= set(targets)


def shell(page: str) -> Iterator[str]:
    for block in re.findall(r"^```console\n(.*?)^```$", PAGES[page], flags=re.MULTILINE | re.DOTALL):
        yield from (line.removeprefix("$ ") for line in block.splitlines())
