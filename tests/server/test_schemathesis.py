"""Cases made from the OpenAPI document of a live server: whatever comes, no 5xx, and answers as the document says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from byte_models import byte_llama
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from live_server import LiveServer, live_server
from requests import Session
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from foredraft import LLM

LENGTH = 64  # max_model_len: whatever is asked for ends soon
METHODS = {"GET", "POST"}
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [1, 2]},
}
"""What each endpoint that takes a body needs."""

FEW = st.sets(st.integers(0, 99), max_size=3)
"""Which of the optional fields are kept beside what is plain; none is named: the body is as it was made."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = byte_llama(tmp_path_factory.mktemp("bytes"), num_modules=1)
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 32}
    with live_server(lambda: LLM(path, dtype="float32", device="cpu", max_model_len=LENGTH, **options)) as live:
        yield live
        live.wait_until_idle()
        assert live.server.failure is None


def with_few_fields(case: Case[Any], kept: set[int]) -> Case[Any]:
    """A plain body with a few of the fields that were made: all of them contradict each other nearly always, and then
    nothing is ever generated."""
    plain = PLAIN.get(case.operation.path)
    if plain is not None and kept and isinstance(case.body, dict):
        others = sorted(set(case.body) - {"prompt", "messages", "tokens", "model"})
        names = {others[index % len(others)] for index in kept} if others else set()
        case.body = plain | {name: value for name, value in case.body.items() if name in names}
    return case


def run_cases(live: LiveServer, num_cases: int) -> Counter[str]:
    """So many cases: for each endpoint as many that fit the document as ones that do not. Returns their statuses."""
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    operations: list[Any] = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert {operation.method.upper() for operation in operations} == METHODS
    assert {operation.path for operation in operations if operation.body} == set(PLAIN)
    statuses: Counter[str] = Counter()
    with Session() as session:
        for operation in operations:
            if not operation.body:
                run_some(operation, GenerationMode.POSITIVE, 3, session, statuses)
                continue
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                run_some(operation, mode, num_cases // (2 * len(PLAIN)), session, statuses)
    return statuses


def run_some(operation: Any, mode: GenerationMode, many: int, session: Session, statuses: Counter[str]) -> None:
    """Cases of one endpoint, all of a kind."""

    @seed(5)
    @settings(
        max_examples=many,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), kept=FEW)
    def asked(case: Case[Any], kept: set[int]) -> None:
        if mode is GenerationMode.POSITIVE:
            case = with_few_fields(case, kept)
        response = case.call(session=session, timeout=60)
        checks = [not_a_server_error, content_type_conformance, status_code_conformance]
        case.validate_response(response, checks=checks)
        statuses[f"{case.operation.path} {response.status_code}"] += 1

    asked()


def assert_all_were_asked(statuses: Counter[str], num_cases: int) -> None:
    """As many as there should be, and both good and bad ones of each endpoint that takes a body."""
    assert sum(statuses.values()) >= num_cases, statuses
    for path in PLAIN:
        assert statuses[f"{path} 200"] > 0, statuses
        assert statuses[f"{path} 400"] > 0, statuses


def test_two_hundred_cases(live: LiveServer) -> None:
    assert_all_were_asked(run_cases(live, 200), 200)


@pytest.mark.slow
def test_two_thousand_cases(live: LiveServer) -> None:
    assert_all_were_asked(run_cases(live, 2_000), 2_000)
