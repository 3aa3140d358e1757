"""A request on its way from one engine to another: what was asked, what has come of it, and its rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from foredraft.engine.handover_bytes import NamedTensor, Source, read_bytes, write_bytes
from foredraft.errors import HandoverError, RequestError, described
from foredraft.exactness import DraftCycle, ExactRows
from foredraft.logprobs import TokenLogprob
from foredraft.media import Media, MediaKind
from foredraft.sampling_params import SamplingParams
from foredraft.statistics import SpeculationStats
from foredraft.structured_output import StructuredOutput

FORMAT_VERSION = 1
DRAFT_PROBS = "draft_probs"


@dataclass(frozen=True)
class Origin:
    """Which model a request was begun with: what must agree before another engine goes on with it.

    target: fingerprint of its weights and configuration. modules: of the weights of each MTP module; where one engine
    has more of them, the first ones must agree. byte_order: of the numbers in rows.
    """

    target: str
    modules: tuple[str, ...]
    dtype: str
    byte_order: str


@dataclass(frozen=True)
class Handover:
    """A request at the end of a step. Nothing in it changes, and it needs no engine: it may be kept, or sent again.

    prompt_token_ids with placeholders, as given; row_ids: what the rows of the prompt go by. seed: of this choice.
    depth: how many tokens it drafts a step, None for as many as its engine may; max_depth: the largest so far.
    output_token_ids, with the depth and the log-probability of each; draft_token_ids: pending, and drafting: how they
    were drawn, for an engine that draws otherwise. scored_prompt: log-probabilities of a prompt that is not whole yet.
    num_computed_tokens, num_state_rows, exact: which rows there are; without any, all are to be computed (again).
    windows: of each part of the cache whose rows travel. tensors: these rows, then `draft_probs` and media.
    """

    origin: Origin
    request_id: str
    prompt_token_ids: tuple[int, ...]
    row_ids: tuple[int, ...]
    media: tuple[Media, ...]
    params: SamplingParams
    seed: int
    num_prompt_logprobs: int | None
    depth: int | None
    max_depth: int
    output_token_ids: tuple[int, ...]
    token_depths: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    scored_prompt: tuple[TokenLogprob | None, ...]
    draft_token_ids: tuple[int, ...]
    drafting: str
    drawn_drafts: tuple[bool, ...]
    num_computed_tokens: int
    num_state_rows: int
    exact: ExactRows
    num_cached_tokens: int | None
    stats: SpeculationStats
    windows: Mapping[str, int | None]
    tensors: tuple[NamedTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(one.tensor.nbytes for one in self.tensors)

    @cached_property
    def rows(self) -> Mapping[str, NamedTensor]:
        """The rows of the cache, by part."""
        return {one.name: one for one in self.tensors if one.name in self.windows}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file, which is there as a whole or not at all. HandoverError if it cannot be."""
        place = Path(path)
        try:
            with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}.", delete=False) as file:
                try:
                    write_bytes(self.header(), self.tensors, file.write)
                    file.flush()
                    os.fsync(file.fileno())
                    Path(file.name).replace(place)
                except BaseException:
                    with suppress(OSError):
                        Path(file.name).unlink()
                    raise
        except OSError as error:
            raise HandoverError(f"{place} cannot be written: {error}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """What `write` has written. HandoverError if it is not there, or not whole."""
        try:
            with Path(path).open("rb", buffering=0) as file:

                def fill(memory: memoryview) -> None:
                    while memory:
                        count = file.readinto(memory)
                        if not count:
                            raise HandoverError(f"{os.fspath(path)} ends too early: it was cut off")
                        memory = memory[count:]

                handover = cls.from_source(fill)
                if file.read(1):
                    raise HandoverError(f"{os.fspath(path)} goes on after its end")
                return handover
        except OSError as error:
            raise HandoverError(f"{os.fspath(path)} cannot be read: {error}") from error

    @classmethod
    def from_source(cls, source: Source) -> Self:
        """From the bytes of `write_bytes`. HandoverError unless every byte is what was written."""
        header, tensors = read_bytes(source)
        try:
            return cls._from_header(header, tensors)
        except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
            raise HandoverError(f"the header does not describe a request: {described(error)}") from error

    def header(self) -> dict[str, Any]:
        """All but the tensors, for JSON."""
        names = [one.name for one in fields(self) if one.name not in ("tensors", "media", "params", "stats")]
        media = [{"kind": one.kind.value, "num_tokens": one.num_tokens} for one in self.media]
        return {
            "format": FORMAT_VERSION,
            **{name: getattr(self, name) for name in names},
            "origin": asdict(self.origin),
            "media": media,
            "params": _params_record(self.params),
            "stats": asdict(self.stats),
        }

    @classmethod
    def _from_header(cls, record: dict[str, Any], tensors: tuple[NamedTensor, ...]) -> Self:
        """Raises whatever comes first if the record is not one of `header`."""
        version = record.pop("format")
        if version != FORMAT_VERSION:
            raise HandoverError(f"the handover has format {version!r:.20}, and this is {FORMAT_VERSION}")
        for name in ("prompt_token_ids", "row_ids", "output_token_ids", "token_depths", "draft_token_ids"):
            record[name] = _integers(name, record[name])
        for name in ("seed", "max_depth", "num_computed_tokens", "num_state_rows"):
            _integers(name, [record[name]])
        for name in ("depth", "num_prompt_logprobs", "num_cached_tokens"):
            _integers(name, [] if record[name] is None else [record[name]])
        origin = record["origin"]
        record["origin"] = Origin(**{**origin, "modules": tuple(origin["modules"])})
        media = [
            Media(
                MediaKind(one["kind"]),
                {
                    t.name.removeprefix(f"media.{index}."): t.tensor
                    for t in tensors
                    if t.name.startswith(f"media.{index}.")
                },
                one["num_tokens"],
            )
            for index, one in enumerate(record["media"])
        ]
        record["media"] = tuple(media)
        record["params"] = _params(record["params"])
        record["logprobs"] = tuple(map(_logprob, record["logprobs"]))
        record["scored_prompt"] = _optional_logprobs(record["scored_prompt"])
        scored = record["prompt_logprobs"]
        record["prompt_logprobs"] = None if scored is None else _optional_logprobs(scored)
        record["drawn_drafts"] = tuple(map(bool, record["drawn_drafts"]))
        record["exact"] = _exact_rows(*record["exact"])
        record["stats"] = _stats(record["stats"])
        if not isinstance(record["windows"], dict):
            raise ValueError("windows must be an object")
        handover = cls(**record, tensors=tensors)
        handover.check()
        return handover

    def check(self) -> None:
        """Raise ValueError unless the numbers of rows and tokens fit each other."""
        num_tokens, computed = len(self.row_ids) + len(self.output_token_ids), self.num_computed_tokens
        counts = self.exact.num_exact_rows
        if len(self.prompt_token_ids) != len(self.row_ids) or len(self.token_depths) != len(self.output_token_ids):
            raise ValueError("prompt_token_ids and row_ids, or tokens and their depths, differ in number")
        if not computed - self.num_state_rows <= max(1, len(self.output_token_ids)) or computed > num_tokens:
            raise ValueError(f"num_computed_tokens={computed} of {num_tokens} tokens")
        if any(count > max(computed, self.exact.origin) for count in counts) or list(counts) != sorted(counts)[::-1]:
            raise ValueError(f"num_exact_rows={counts} of {computed} computed ones")
        cycle = self.exact.cycle
        if cycle is not None and (cycle.num_tokens > num_tokens or cycle.depth > len(counts)):
            raise ValueError(f"the drafts were made by {cycle.depth} modules after {cycle.num_tokens} tokens")
        if len(self.drawn_drafts) > len(self.draft_token_ids):
            raise ValueError("more drafts were drawn than there are")
        if not 1 <= len(self.scored_prompt) <= max(1, len(self.row_ids)):
            raise ValueError(f"scored_prompt has {len(self.scored_prompt)} of {len(self.row_ids)} tokens")


def _stats(record: dict[str, Any]) -> SpeculationStats:
    lists = ("drafted_by_depth", "accepted_by_depth")
    for name, value in record.items():
        _integers(name, value if name in lists else [value])
    if len({len(record[name]) for name in lists}) > 1:
        raise ValueError(f"{' and '.join(lists)} differ in number")
    return SpeculationStats(**record)


def _params_record(params: SamplingParams) -> dict[str, Any]:
    values = {one.name: getattr(params, one.name) for one in fields(params) if one.name != "logits_processors"}
    wanted = params.structured_output
    return {**values, "structured_output": None if wanted is None else asdict(wanted)}


def _params(record: dict[str, Any]) -> SamplingParams:
    wanted = record.pop("structured_output")
    return SamplingParams(**record, structured_output=None if wanted is None else StructuredOutput(**wanted))


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{name} must hold integers from 0 on")
    return tuple(values)


def _exact_rows(counts: Any, cycle: Any, origin: int, kept_from: int) -> ExactRows:
    _integers("exact", [*counts, origin, kept_from, *(cycle or ())])
    return ExactRows(tuple(counts), None if cycle is None else DraftCycle(*cycle), origin, kept_from)


def _logprob(record: Any) -> TokenLogprob:
    token_id, logprob, rank, top = record
    return TokenLogprob(token_id, logprob, rank, tuple((other, value) for other, value in top))


def _optional_logprobs(records: Any) -> tuple[TokenLogprob | None, ...]:
    return tuple(None if record is None else _logprob(record) for record in records)
