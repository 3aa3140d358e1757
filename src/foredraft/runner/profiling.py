"""How much memory is left for the cache: the largest steps are run, and what they took is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from foredraft.cache.storage import CacheStorage
from foredraft.errors import ConfigError
from foredraft.exactness import ExactRows
from foredraft.plan import RequestPlan, RequestTerms, StepPlan, WindowPlan
from foredraft.runner.memory import CacheDemand, CacheSize, in_units
from foredraft.runner.model_runner import ModelRunner
from foredraft.runner.pass_graphs import LARGEST_PASS_GRAPH
from foredraft.sampling_params import SamplingParams

GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory to use where nothing is said."""
_ALLOCATION_UNIT = 2 << 20
"""torch's allocator takes memory for a large tensor in multiples of this."""
_PARAMS = SamplingParams(temperature=1.0, top_p=0.99, typical_p=0.99, repetition_penalty=1.1, logprobs=1)
"""Sampling that changes all logits and ranks the whole vocabulary at every row, which takes the most memory."""
_PLAIN = SamplingParams(temperature=1.0)
"""Sampling of steps whose state is on the device, with their graphs and what drafts were drawn from."""
_FILTERED = SamplingParams(temperature=1.0, top_k=50, top_p=0.99, min_p=0.01, typical_p=0.99)
"""The same with all filters, which take the most memory of a graph."""


@dataclass(frozen=True)
class MemoryProfile:
    """What a device's memory is taken by, in bytes.

    used_by_others_bytes: all that torch's allocator in this process does not hold: other processes, the CUDA context,
    loaded kernels. peak_bytes: the most that the allocator held, weights and all, the cache left out.
    """

    total_bytes: int
    used_by_others_bytes: int
    peak_bytes: int

    def cache_bytes(self, utilization: float, reserved_bytes: int = 0) -> int:
        """What is left for the cache if `utilization` of the device's memory is used in all, and so much is kept free.

        Raises ConfigError, with the numbers, if that is nothing.
        """
        allowed = int(self.total_bytes * utilization)
        left = allowed - self.used_by_others_bytes - self.peak_bytes - reserved_bytes
        if left <= 0:
            raise ConfigError(
                f"gpu_memory_utilization={utilization} leaves no memory for the cache: {in_units(allowed)} of "
                f"{in_units(self.total_bytes)} may be used, the model and its largest step take "
                f"{in_units(self.peak_bytes + reserved_bytes)}, others on the device "
                f"{in_units(self.used_by_others_bytes)}: raise "
                f"gpu_memory_utilization, or lower max_num_batched_tokens, max_num_seqs or max_model_len"
            )
        return left


def measure_memory(device: torch.device) -> MemoryProfile:
    """How a CUDA device's memory is used now; the peak is that of now."""
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return MemoryProfile(total_bytes, max(0, total_bytes - free_bytes - reserved), reserved)


def profile_memory(
    make_runner: Callable[[CacheStorage], ModelRunner],
    demand: CacheDemand,
    size: CacheSize,
    device: torch.device,
) -> MemoryProfile:
    """Run the largest steps on a CUDA device and measure what they took; nothing of them is left.

    size: a cache at least as large as the one to come: its tokens bound how far back the steps attend.
    Raises ConfigError if there is no memory for such a step.
    """
    config, layout = demand.config, demand.layout
    torch.cuda.reset_peak_memory_stats(device)
    try:
        num_bytes = run_largest_steps(make_runner, demand, size, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"there is no memory on {device.type} for a step of max_num_batched_tokens={config.max_num_batched_tokens} "
            f"rows, or one of max_num_seqs={config.max_num_seqs} requests with {demand.max_depth} drafts each, "
            f"in sequences of max_model_len={size.max_model_len} tokens: lower one of them"
        ) from error
    peak = torch.cuda.max_memory_reserved(device)
    # Each of the cache's tensors may take up to one unit more than its size.
    num_others = sum(len(group.inputs) + len(group.states) for group in layout.groups)
    num_tensors = 1 + 2 * (len(layout.target) + len(layout.modules)) + num_others
    # Others are measured last: kernels that the steps were the first to use have been loaded.
    return replace(measure_memory(device), peak_bytes=peak - num_bytes + num_tensors * _ALLOCATION_UNIT)


def run_largest_steps(
    make_runner: Callable[[CacheStorage], ModelRunner],
    demand: CacheDemand,
    size: CacheSize,
    device: torch.device,
) -> int:
    """Run the steps that take the most memory over a cache of two blocks; returns what that cache took, in bytes.

    A prefill of max_num_batched_tokens rows at the end of the longest sequences, then max_num_seqs decodes without
    drafts and with K each, sampled, in sequences as long as that many can be at once. Any device will do.
    """
    config, layout = demand.config, demand.layout
    storage = CacheStorage(layout, (2,) * len(layout.groups), config.block_size, device)
    for group in range(len(layout.groups)):
        for rows in (*storage.block(group, 0), *storage.block(group, 1)):
            rows.zero_()  # rows that no step has written are read
    runner = make_runner(storage)
    steps = _LargestSteps(demand, size)
    most = config.max_num_batched_tokens
    # What graphs take is not given back to the allocator, so that it comes on top.
    for num_rows in (most,) if runner.captured is None else (most, min(most, LARGEST_PASS_GRAPH)):
        prefill = steps.prefill(num_rows)
        runner.execute(prefill)
        for request in prefill.requests:
            runner.forget(request.request_id)  # others come under the same ids
    for params in (_PARAMS, *((_PLAIN, _FILTERED) if runner.resident is not None else ())):
        steps = replace(steps, params=params)
        drafted = runner.execute(steps.decode([(0,)] * config.max_num_seqs, 0))
        pending = [(result.token_ids[-1], *result.draft_token_ids) for result in drafted.requests]
        runner.execute(steps.decode(pending, 1))
        runner.forget_all()
    return storage.num_bytes


@dataclass(frozen=True)
class _LargestSteps:
    """Plans of the largest steps.

    The tables of all requests name one block over and over: what its rows hold is of no interest here, and sequences of
    any length need no more memory.
    """

    demand: CacheDemand
    size: CacheSize
    params: SamplingParams = _PARAMS

    @property
    def _max_total_tokens(self) -> int:
        return max(self.size.max_model_len, 2 * self.demand.max_depth + 3)

    @property
    def _longest(self) -> int:
        """Tokens of a sequence that leave room for a decode, all drafts accepted, and for those drafted after it."""
        return self._max_total_tokens - 2 * (self.demand.max_depth + 1)

    def prefill(self, left: int) -> StepPlan:
        """So many rows, the last of as few sequences as may be."""
        plans: list[RequestPlan] = []
        while left and len(plans) < self.demand.config.max_num_seqs:
            num_rows = min(left, self._longest)
            plans.append(self._request(len(plans), (0,) * num_rows, 0, self._longest))
            left -= num_rows
        return StepPlan(tuple(plans))

    def decode(self, pending: Sequence[tuple[int, ...]], num_decoded: int) -> StepPlan:
        """For each request its newest token and its pending drafts, in sequences as long as all can be at once.

        num_decoded: how many tokens earlier steps have emitted for each.
        """
        num_tokens = self._longest
        if self.size.num_tokens is not None:
            num_tokens = max(1, min(num_tokens, self.size.num_tokens // len(pending)))
        num_tokens += num_decoded
        plans = (self._request(i, tokens, len(tokens) - 1, num_tokens) for i, tokens in enumerate(pending))
        return StepPlan(tuple(plans))

    def _request(self, index: int, token_ids: tuple[int, ...], num_draft_tokens: int, num_tokens: int) -> RequestPlan:
        end = num_tokens + num_draft_tokens
        first_row = end - len(token_ids)
        start = max(0, first_row - self.demand.max_depth)  # no steady window is longer
        window = WindowPlan(
            start=start,
            end=end,
            token_ids=(0,) * (num_tokens - 1 - start),
            exact=ExactRows((start,) * len(self.demand.layout.modules)),
            depth=self.demand.max_depth,
        )
        return RequestPlan(
            terms=RequestTerms(
                request_id=str(index),
                prompt_token_ids=(0,) * num_tokens,
                params=self.params,
                seed=index,
                max_total_tokens=self._max_total_tokens,
                stop_token_ids=frozenset(),
                arrival=index,
            ),
            token_ids=token_ids,
            first_row=first_row,
            num_draft_tokens=num_draft_tokens,
            num_tokens=num_tokens,
            is_sampling=True,
            blocks=((1,) * -(-self._max_total_tokens // self.demand.config.block_size),)
            * len(self.demand.layout.groups),
            window=window if self.demand.max_depth else None,
            num_state_rows=first_row,
        )
