"""What a caller's own rule for logits looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenHistory:
    """What comes before the token that is chosen; of drafts, only those before it."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


@runtime_checkable
class LogitsProcessor(Protocol):
    """A caller's own rule. It runs at every row that a token is chosen from, drafted ones included.

    is_stateful False: `process` depends on its arguments alone. It may be called for any row in any order, also for
    histories that hold drafts which are rejected later. One object may serve many requests.
    is_stateful True: it must be a `StatefulLogitsProcessor`.
    """

    is_stateful: bool

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        """The logits [V] float32 to use instead of `logits`, which are its to change; -inf bans a token."""
        ...


@runtime_checkable
class StatefulLogitsProcessor(LogitsProcessor, Protocol):
    """A rule with a memory. Each request works on a clone of its own, and each drafted row on a clone of that.

    `advance` is called with every generated token in order, so that the clone of a rejected draft is dropped and leaves
    no trace.
    """

    def advance(self, token_id: int) -> None:
        """Take note of a generated token."""
        ...

    def clone(self) -> Self:
        """An independent copy in the same state."""
        ...
