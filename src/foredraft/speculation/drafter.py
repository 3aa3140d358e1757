"""Drafting: the chain of passes that keeps every module's KV exact and makes the next draft tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.models.attention import PagedAttention
from foredraft.models.draft_head import DraftHead
from foredraft.models.media_store import MediaRows, MediaStore, text_ids
from foredraft.models.mtp import ModuleForward, MtpModules
from foredraft.models.row_layout import GroupRows, RowSpan, group_rows
from foredraft.models.target import TargetModel
from foredraft.sampling.philox import Stream, cycle_keys, uniform
from foredraft.sampling.processors import RuledRows, apply_rules
from foredraft.sampling.sampler import SamplingTensors, greedy, probabilities, sample
from foredraft.sampling.sampling_state import SamplingState

RESERVED_SLOT = 0


@dataclass(frozen=True)
class Window:
    """The rows of one request that the passes run over, verification being done.

    Rows start..end-1 (s..c-1); token_ids are the committed tokens from t[start+1] on, num_tokens is n. `num_passes`
    modules run; `num_drafts` tokens are drafted (0: the rows only, as in a prefill chunk that is not the last).
    Modules have no rows before `origin`. hidden_slots: where h0 of the window's rows lies; module_slots: by cache
    group, the slots of rows 0, 1, ...; all on the CPU.
    """

    request_id: str
    start: int
    end: int
    num_tokens: int
    token_ids: tuple[int, ...]
    num_exact_rows: tuple[int, ...]
    num_passes: int
    num_drafts: int
    origin: int
    hidden_slots: Tensor
    module_slots: Mapping[int, Tensor]


@dataclass(frozen=True)
class Drafts:
    """token_ids [W, max drafts], -1 where a window drafts fewer; probs, for each window and draft: the probabilities
    [N], by column of the draft head, that it was drawn from, None if it was chosen without chance."""

    token_ids: Tensor
    probs: tuple[tuple[Tensor | None, ...], ...]


@dataclass(frozen=True)
class PassRows:
    """Which rows one pass computes for each window: `num_rows` from `first_row` on; 0 rows: it takes no part.

    Row i reads token t[i + offset] and sits at position i + offset, in module number `module`. `is_extra` marks a
    further draft of a single module: one row, which reads the last output of the previous pass.
    """

    module: int
    offset: int
    is_extra: bool
    first_row: tuple[int, ...]
    num_rows: tuple[int, ...]

    def covers(self, other: PassRows) -> bool:
        """Whether both passes run over the same rows."""
        return (self.first_row, self.num_rows) == (other.first_row, other.num_rows)


class Drafter:
    """Runs the passes. Pass k is module k over the window, hidden from pass k-1, tokens shifted left by one more.
    (Where modules are not chained, hidden is the target's in every pass.)

    A checkpoint with a single module may draft several tokens: pass j >= 2 is then one row, one further each time,
    with the previous pass's output and draft (DeepSeek-V3 technical report, 2024, section 2.2, at inference).
    graphed: what runs a pass in the place of the modules' own forward, the same from graphs. media: embeddings of what
    prompts show, where the model takes it.
    """

    def __init__(self, target: TargetModel, modules: MtpModules, storage: CacheStorage, head: DraftHead) -> None:
        self._target = target
        self.head = head
        self.modules = modules
        self.graphed: ModuleForward | None = None
        self.media: MediaStore | None = None
        self._storage = storage

    def run(
        self, windows: Sequence[Window], sampling: SamplingTensors, rules: Sequence[SamplingState | None]
    ) -> Drafts:
        """Run all passes of `windows`; `sampling` has a row a window, temperature 0 for greedy drafts. rules: those of
        each window, if it has any; drafts are made under them, as the target's tokens are."""
        chain = _Chain(windows, self._target.device, self.media)
        of_target = hidden = self._storage.hidden.index_select(0, chain.hidden_slots)
        forward = self.graphed or self.modules.forward
        previous: PassRows | None = None
        attention: dict[int, GroupRows] = {}
        for index in range(max(window.num_passes for window in windows)):
            rows = _pass_rows(windows, index, self.modules.num_modules)
            if not any(rows.num_rows):
                break
            is_alike = previous is not None and rows.covers(previous)
            if not is_alike:
                attention = {}
            if not (self.modules.is_chained or rows.is_extra):
                hidden = chain.carry(of_target, None, rows)
            elif not is_alike:
                hidden = chain.carry(hidden, previous, rows)
            token_ids, positions, media = chain.inputs(rows)
            paged = self._paged(chain, rows, attention, media)
            hidden = forward(rows.module, token_ids, positions, hidden, paged)
            self._make_drafts(index, chain, rows, hidden, sampling, rules)
            previous = rows
        return chain.drafts()

    def _make_drafts(
        self,
        index: int,
        chain: _Chain,
        rows: PassRows,
        hidden: Tensor,
        sampling: SamplingTensors,
        rules: Sequence[SamplingState | None],
    ) -> None:
        """Make draft number `index` of every window that wants one, from the last row of its pass."""
        drafting = [w for w, window in enumerate(chain.windows) if window.num_drafts > index]
        if proposals := self.propose(drafting, rules, chain):
            chain.record(index, list(proposals), torch.tensor(list(proposals.values())), None)
            drafting = [w for w in drafting if w not in proposals]
        if not drafting:
            return
        last = hidden.index_select(0, chain.last_rows(rows, drafting))
        logits = self.head.for_module(rows.module).logits(last)
        ruled = [chain.ruled(w, row, state) for row, w in enumerate(drafting) if (state := rules[w]) is not None]
        if ruled:  # what goes wrong there will go wrong at the target's row, and is reported there
            by_token, _ = apply_rules(self.head.widen(logits, -torch.inf), ruled, is_draft=True)
            logits = self.head.narrow(by_token)
        windows = [chain.windows[w] for w in drafting]
        chosen, probs = self.choose(index, windows, logits, chain.rows_of(sampling, drafting))
        chain.record(index, drafting, chosen, probs)

    def propose(self, drafting: Sequence[int], rules: Sequence[SamplingState | None], chain: _Chain) -> dict[int, int]:
        """The next draft of the windows where their rules leave nothing to choose: no head runs for them."""
        proposals = {}
        for w in drafting:
            if (state := rules[w]) is not None:
                token_id = state.proposal_after(chain.drafts_of(w), self.head.known)
                if token_id is not None:
                    proposals[w] = token_id
        return proposals

    def choose(
        self, index: int, windows: Sequence[Window], logits: Tensor, sampling: SamplingTensors
    ) -> tuple[Tensor, Tensor | None]:
        """Draft number `index` of each window from its module's logits [W, N]: ids [W], and the probabilities
        [W, N] that they were drawn from (None: every draft is a point mass)."""
        if sampling.all_greedy:
            return self.head.full_ids(greedy(logits)), None
        probs = probabilities(logits, sampling)
        positions = torch.tensor([window.num_tokens for window in windows], device=logits.device)
        columns = sample(probs, uniform(sampling.seeds, cycle_keys(positions, index), Stream.DRAFT))
        return self.head.full_ids(columns), probs

    def _paged(
        self, chain: _Chain, rows: PassRows, attention: dict[int, GroupRows], media: MediaRows | None
    ) -> PagedAttention:
        """What a pass needs in the cache. attention: what earlier passes over the same rows have laid out, by group."""
        for group in self._storage.layout.groups_of_module[rows.module]:
            slots = chain.write_slots(rows, group)
            if group in attention:
                attention[group] = replace(attention[group], slots=slots)
            else:
                spans = chain.spans(rows, group)
                attention[group] = group_rows(self._storage, group, slots, spans, self._target.device)
        return PagedAttention.of_module(self._storage, rows.module, attention, media=media)


def _pass_rows(windows: Sequence[Window], index: int, num_modules: int) -> PassRows:
    """The rows of pass number `index` (0-based): depth k = index + 1."""
    if index >= num_modules:
        first = tuple(window.end + index - 1 for window in windows)
        return PassRows(0, 1, True, first, tuple(int(window.num_drafts > index) for window in windows))
    depth = index + 1
    ends = (w.end if w.num_drafts > index else min(w.end, w.num_tokens - depth) for w in windows)
    counts = tuple(max(0, end - window.start) if window.num_passes > index else 0 for window, end in zip(windows, ends))
    return PassRows(index, depth, False, tuple(window.start for window in windows), counts)


class _Chain:
    """What the passes of one call hand on to each other: tokens with drafts filled in, slots, chosen drafts."""

    def __init__(self, windows: Sequence[Window], device: torch.device, store: MediaStore | None) -> None:
        self.windows = windows
        self._device = device
        self._bases: list[int] = []
        tokens: list[int] = []
        for window in windows:
            self._bases.append(len(tokens) - window.start - 1)  # token t[i] of the window lies at base + i
            tokens += (*window.token_ids, *(0,) * window.num_drafts)
        self._media = store.rows(tokens) if store is not None else None
        self._media_row: dict[int, int] = {}  # by where in the tokens it stands
        if self._media is not None:
            self._media_row = {place: row for row, place in enumerate(self._media.places.tolist())}
            tokens = text_ids(tokens)
        self._tokens = torch.tensor(tokens, dtype=torch.int64).to(device)
        max_drafts = max((window.num_drafts for window in windows), default=0)
        self._drafts = torch.full((len(windows), max_drafts), -1, dtype=torch.int64, device=device)
        self._probs: list[list[Tensor | None]] = [[] for _ in windows]
        self.hidden_slots = torch.cat([window.hidden_slots for window in windows]).to(device)

    def carry(self, hidden: Tensor, previous: PassRows | None, rows: PassRows) -> Tensor:
        """The rows of the previous pass's output (before the first pass: h0 of the whole window) that `rows` read."""
        if previous is None:
            starts = tuple(window.start for window in self.windows)
            previous = PassRows(0, 0, False, starts, tuple(window.end - window.start for window in self.windows))
        index: list[int] = []
        base = 0
        for w, count in enumerate(rows.num_rows):
            shift = previous.num_rows[w] - 1 if rows.is_extra else rows.first_row[w] - previous.first_row[w]
            index += range(base + shift, base + shift + count)
            base += previous.num_rows[w]
        return hidden.index_select(0, torch.tensor(index, dtype=torch.int64).to(self._device))

    def inputs(self, rows: PassRows) -> tuple[Tensor, Tensor, MediaRows | None]:
        """token_ids [T] and positions [T] of a pass, and which rows read what is shown instead; drafts that earlier
        passes made are in place."""
        index: list[int] = []
        positions: list[int] = []
        for base, first, count in zip(self._bases, rows.first_row, rows.num_rows):
            start = first + rows.offset
            positions += range(start, start + count)
            index += range(base + start, base + start + count)
        both = torch.tensor([index, positions], dtype=torch.int64).to(self._device)
        return self._tokens.index_select(0, both[0]), both[1], self._media_at(index)

    def _media_at(self, index: Sequence[int]) -> MediaRows | None:
        """index: where in the tokens each row of a pass reads."""
        found = [(place, self._media_row[at]) for place, at in enumerate(index) if at in self._media_row]
        if self._media is None or not found:
            return None
        both = torch.tensor(found).t().to(self._device)
        return MediaRows(both[0], self._media.embeddings.index_select(0, both[1]))

    def spans(self, rows: PassRows, group: int) -> list[RowSpan]:
        """What the rows of a pass attend to in the modules of a cache group."""
        return [
            RowSpan(count, first + count, window.module_slots[group][: first + count], window.origin)
            for window, first, count in zip(self.windows, rows.first_row, rows.num_rows)
            if count
        ]

    def write_slots(self, rows: PassRows, group: int) -> Tensor:
        """Where each row's KV goes: rows that are exact already go to the reserved block and stay as they are."""
        parts = []
        for window, first, count in zip(self.windows, rows.first_row, rows.num_rows):
            if count:
                slots = window.module_slots[group][first : first + count].clone()
                slots[: max(0, window.num_exact_rows[rows.module] - first)] = RESERVED_SLOT
                parts.append(slots)
        return torch.cat(parts).to(self._device)

    def last_rows(self, rows: PassRows, drafting: Sequence[int]) -> Tensor:
        """Flat index of the last row of each drafting window."""
        ends = torch.tensor(rows.num_rows).cumsum(0) - 1
        return ends[list(drafting)].to(self._device)

    def rows_of(self, sampling: SamplingTensors, drafting: Sequence[int]) -> SamplingTensors:
        if len(drafting) == len(self.windows):
            return sampling
        return sampling.rows(torch.tensor(drafting, device=self._device))

    def record(self, index: int, drafting: Sequence[int], chosen: Tensor, probs: Tensor | None) -> None:
        """Put the drafts of a pass where the next passes read them, and keep what they were drawn from."""
        chosen = chosen.to(self._device)
        where = [self._bases[w] + self.windows[w].num_tokens + index for w in drafting]
        self._tokens.index_copy_(0, torch.tensor(where).to(self._device), chosen)
        self._drafts[torch.tensor(drafting).to(self._device), index] = chosen
        for position, w in enumerate(drafting):
            self._probs[w].append(None if probs is None else probs[position])

    def drafts_of(self, w: int) -> tuple[int, ...]:
        """The drafts that a window has so far, for the host: on a GPU this waits for them."""
        return tuple(self._drafts[w, : len(self._probs[w])].tolist())

    def ruled(self, w: int, row: int, state: SamplingState) -> RuledRows:
        """A window's rules at the row of its next draft."""
        drafts = self.drafts_of(w)
        return RuledRows(state, row, drafts, len(drafts))

    def drafts(self) -> Drafts:
        return Drafts(self._drafts, tuple(tuple(probs) for probs in self._probs))
