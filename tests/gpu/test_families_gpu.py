"""Every family on a CUDA device, run as it is by default: the tokens of the CPU in float32."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from families.contract import FamilyCase, FamilyContract

from foredraft import LLM, SamplingParams

pytestmark = pytest.mark.gpu

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "families").glob("test_*.py"))
PROMPTS = [[1 + (7 * i + j) % 60 for j in range(length)] for i, length in enumerate((1, 9, 30, 17))]


def cases() -> dict[str, FamilyCase]:
    """Of all contracts, by name."""
    found = (vars(import_module(f"families.{name}")).values() for name in MODULES)
    contracts = (one for values in found for one in values if isinstance(one, type) and issubclass(one, FamilyContract))
    return {one.case.name: one.case for one in contracts if hasattr(one, "case")}


def tokens(case: FamilyCase, path: Path, device: str) -> list[tuple[int, ...]]:
    settings = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 4, "max_num_batched_tokens": 64, **case.settings}
    depth = max(case.depths)
    with LLM(path, device=device, dtype="float32", num_speculative_tokens=depth, **settings) as llm:
        params = [
            SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=seed)
            for seed, temperature in enumerate((0.0, 0.8, 0.0, 1.2))
        ]
        outputs = [output.token_ids for output in llm.generate(PROMPTS, params)]
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == outputs
        llm.engine.cache.check_integrity()
    return outputs


@pytest.mark.parametrize("name", cases())
def test_tokens_are_those_of_the_cpu(tmp_path: Path, name: str) -> None:
    case = cases()[name]
    path = case.build(tmp_path / "model")
    assert tokens(case, path, "cuda") == tokens(case, path, "cpu")
