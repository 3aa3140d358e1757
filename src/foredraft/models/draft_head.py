"""The head that drafts are chosen with: of the target's head, the tokens and the bits that are worth their time.

On a small batch the head is the largest cost of a draft. The target verifies with the whole head as it is, so a smaller
one for drafts changes how many are accepted, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.kernels.ops import kernels_of
from foredraft.kernels.torch.int8_head import int8_rows
from foredraft.models.quantization import Int8Linear

_INT8_ENGINES = ("x86", "fbgemm")
"""What torch multiplies int8 with on a CPU that `Int8Linear` runs on."""
_LARGE = 2**24
"""Numbers of a head from which on a CPU gains by 8 bits; smaller ones cost next to nothing as they are."""
_LARGE_ON_GPU = 2**28
"""The same on a GPU, where reading fewer bytes tells only in a large head."""


def best_bits(weight: Tensor) -> int:
    """The bits of a draft head that measured best for a target's head `weight`: see docs/benchmarks.md."""
    if weight.device.type == "cuda":
        return 8 if weight.numel() >= _LARGE_ON_GPU else 16
    is_fast = weight.device.type == "cpu" and torch.backends.quantized.engine in _INT8_ENGINES
    return 8 if is_fast and weight.numel() >= _LARGE else 16


class DraftHead:
    """A head over N of the target's V tokens: column j of its logits is token token_ids[j].

    token_ids: [N] int64, ascending, so that ties fall as with the whole head; None: the first N tokens in order.
    vocab_size: V, or N without token_ids. divisor, norm: of the hidden states, before the head. known: the tokens as an
    index into rows of V on the host.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        scales: Tensor | None,
        token_ids: Tensor | None,
        vocab_size: int,
        divisor: float = 1.0,
        norm: nn.Module | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.scales = scales
        self.token_ids = token_ids
        self.vocab_size = vocab_size
        self.divisor = divisor
        self.norm = norm
        self._own: tuple[DraftHead, ...] = ()
        self.known: slice | Tensor = slice(0, len(weight)) if token_ids is None else token_ids.cpu()
        self._packed: Int8Linear | None = None
        if scales is not None and weight.device.type == "cpu" and torch.backends.quantized.engine in _INT8_ENGINES:
            self._packed = Int8Linear(weight, bias, scales)

    @classmethod
    def build(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        token_ids: Tensor | None = None,
        bits: int = 16,
        scales: Tensor | None = None,
        divisor: float = 1.0,
        norm: nn.Module | None = None,
    ) -> DraftHead:
        """The head for drafts of a target's head `weight` [V, H], `bias` [V].

        token_ids: the tokens that it is to know, int64, all different, in any order; their rows are copied. None: all
        that have a row in `weight`, without a copy. bits: 16 leaves the numbers as they are, 8 copies them to int8.
        scales [V]: those of a weight that is int8 already.
        """
        vocab_size = len(weight)
        if token_ids is not None:
            token_ids = token_ids.to(weight.device).sort().values
            weight = weight.detach()[token_ids]
            bias, scales = (None if values is None else values.detach()[token_ids] for values in (bias, scales))
        if bits == 8 and scales is None:
            weight, scales = int8_rows(weight)
        return cls(weight, bias, scales, token_ids, vocab_size, divisor, norm)

    @classmethod
    def of_modules(cls, heads: Sequence[DraftHead]) -> DraftHead:
        """One head for each module, over the same tokens, as one: `for_module` tells them apart."""
        first = heads[0]
        first._own = tuple(heads)
        return first

    def for_module(self, module: int) -> DraftHead:
        """The head that the drafts of a module are chosen with: this one, unless each has its own."""
        return self._own[module] if self._own else self

    @property
    def bits(self) -> int:
        """8, or 16 for numbers as the target has them."""
        return 16 if self.scales is None else 8

    @property
    def num_bytes(self) -> int:
        """What is read for one draft."""
        parts = [part for part in (self.weight, self.bias, self.scales) if part is not None]
        return sum(part.numel() * part.element_size() for part in parts)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> [R, N]: float32 if the head is int8, else in the type of `hidden`."""
        hidden = self._scaled(hidden)
        if self.scales is None:
            return F.linear(hidden, self.weight, self.bias)
        if self._packed is not None:
            logits: Tensor = self._packed(hidden.float())
            return logits
        if hidden.is_cuda:
            from foredraft.kernels.triton.int8_head import int8_logits
        else:
            from foredraft.kernels.torch.int8_head import int8_logits
        return int8_logits(hidden, self.weight, self.scales, self.bias)

    def argmax(self, hidden: Tensor) -> Tensor:
        """The token of each row's highest logit, the lowest on a tie: hidden [R, H] -> ids [R] int64.

        On a GPU without writing the logits.
        """
        if self.scales is not None and not hidden.is_cuda:
            return self.full_ids(self.logits(hidden).argmax(dim=-1))
        hidden = self._scaled(hidden)
        if self.scales is None:
            return self.full_ids(kernels_of(hidden.device).argmax_head(hidden, self.weight, self.bias))
        from foredraft.kernels.triton.int8_head import int8_argmax

        return self.full_ids(int8_argmax(hidden, self.weight, self.scales, self.bias))

    def _scaled(self, hidden: Tensor) -> Tensor:
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.divisor == 1.0 else hidden / self.divisor

    def full_ids(self, columns: Tensor) -> Tensor:
        """The tokens of columns; both int64, of one shape."""
        return columns if self.token_ids is None else self.token_ids[columns]

    def widen(self, rows: Tensor, fill: float) -> Tensor:
        """Rows [R, N] by column to rows [R, V] by token, with `fill` at tokens that the head does not know.

        Without token_ids the two are the same.
        """
        if self.token_ids is None:
            return rows
        return rows.new_full((len(rows), self.vocab_size), fill).index_copy_(1, self.token_ids, rows)

    def narrow(self, rows: Tensor) -> Tensor:
        """The way back: rows [R, V] by token to rows [R, N] by column."""
        return rows if self.token_ids is None else rows.index_select(1, self.token_ids)
