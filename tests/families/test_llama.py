"""Llama with three modules, each of which drafts one token, and with one that drafts several."""

from __future__ import annotations

from functools import partial

from families.contract import FamilyCase, FamilyContract
from tiny_models import tiny_llama


class TestThreeModules(FamilyContract):
    case = FamilyCase("llama", tiny_llama, num_modules=3, depths=(1, 2, 3))


class TestOneModule(FamilyContract):
    case = FamilyCase("chained_llama", partial(tiny_llama, num_modules=1), num_modules=1, depths=(1, 3, 8))
