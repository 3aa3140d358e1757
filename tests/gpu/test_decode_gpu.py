"""The functions between forward passes on a CUDA device, one by one and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from decode_cases import DecodeCase, Events, assert_alike, assert_equal, decode_cases, run_cycle
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.kernels.decode_ops import decode_kernels_named

pytestmark = pytest.mark.gpu

SEEDS = st.integers(0, 2**31)


@pytest.mark.parametrize("is_sampled", [False, True])
@given(case=decode_cases(), seed=SEEDS)
@settings(max_examples=100)
def test_a_cycle_is_that_of_torch(is_sampled: bool, case: DecodeCase, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    assert_alike(case, Events.random(case, generator, is_sampled=is_sampled), run_cycle)


@given(case=decode_cases(), seed=SEEDS)
@settings(max_examples=10)
def test_a_graph_replays_cycles(case: DecodeCase, seed: int) -> None:
    ours, theirs = case.clone(), case.clone()
    kernels, generator = decode_kernels_named("triton"), torch.Generator().manual_seed(seed)
    events = Events.random(case, generator)
    run_cycle(kernels, ours, events)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_cycle(kernels, ours, events)
    ours.state.ints.copy_(case.state.ints)
    for _ in range(12):
        events.copy_(Events.random(case, generator))
        graph.replay()
        assert_equal(results, run_cycle(decode_kernels_named("torch"), theirs, events))
        assert torch.equal(ours.state.ints, theirs.state.ints)
