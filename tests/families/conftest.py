from __future__ import annotations

import pytest
from families.case import FamilyModel
from families.histories import Machines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of a contract that takes `depth` runs at every depth of its case."""
    if "depth" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("depth", metafunc.cls.case.depths)


@pytest.fixture(scope="class")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    """The checkpoint of the class's case, written and loaded once."""
    case = request.cls.case
    return FamilyModel(case, tmp_path_factory.mktemp("family") / case.name)


@pytest.fixture
def machines(model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """State machines over that checkpoint."""
    return Machines.over(model, monkeypatch)
