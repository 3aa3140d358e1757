"""A target and its modules in fused form: proved against transformers' own forward before anything relies on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import MtpModel

from foredraft.kernels.ops import Kernels, kernels_of
from foredraft.models.attention import PLAIN, PagedAttention, Rotation, ScoreTerms
from foredraft.models.fused_layer import FusedLayer, FusedNorm, apply_linear, is_plain_norm
from foredraft.models.packed import pack
from foredraft.models.rotary import MAX_TABLE_POSITIONS, RotaryTable

_logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the length of a row's difference, relative to the row's, after one layer: some roundings differ."""
_LOOSE = 0.25
"""The same after all layers: they add up, but what is not the same arithmetic is further away."""
_NUM_PROBE_ROWS = 5


class FusedDecoder:
    """The decoder of a target: embedding, layers, final norm."""

    def __init__(
        self, embed: nn.Module, layers: Sequence[FusedLayer], norm: FusedNorm, rotary: RotaryTable, kernels: Kernels
    ) -> None:
        self._embed = embed
        self._layers = layers
        self._norm = norm
        self.rotary = rotary
        self.kernels = kernels

    @classmethod
    def of(
        cls, decoder: Any, max_positions: int, kernels: Kernels | None = None, *, is_packed: bool = False
    ) -> FusedDecoder | None:
        """The fused form of a transformers decoder that runs positions below `max_positions`; None, and the decoder is
        as it was, if it is of another kind, or computes something else than its parts suggest. is_packed: with weights
        in the layout of a CPU's products, a copy."""
        rotary, embed, norm = (getattr(decoder, name, None) for name in ("rotary_emb", "embed_tokens", "norm"))
        is_known = isinstance(rotary, nn.Module) and type(embed) is nn.Embedding and is_plain_norm(norm)
        if not is_known or _has_rotary_by_layer(decoder) or max_positions > MAX_TABLE_POSITIONS:
            return None
        weight: Tensor = decoder.embed_tokens.weight
        chosen = kernels or kernels_of(weight.device)
        layers = [FusedLayer.of(layer, chosen) for layer in decoder.layers[: decoder.config.num_hidden_layers]]
        whole = [layer for layer in layers if layer is not None]
        if len(whole) < len(layers):
            return None
        if is_packed:
            for layer in whole:
                layer.pack()
        assert isinstance(rotary, nn.Module)
        with torch.inference_mode():
            table = RotaryTable.of(rotary, max_positions, weight)
        fused = cls(decoder.embed_tokens, whole, FusedNorm(norm, chosen), table, chosen)
        return fused if fused._equals(decoder) else None

    def forward(self, token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
        """token_ids, positions [T] -> the state after the final norm, [T, hidden_size]."""
        hidden: Tensor = self._embed(token_ids)
        residual: Tensor | None = None
        for layer in self._layers:
            hidden, residual = layer(hidden, residual, positions, self.rotary, paged)
        return self._norm(hidden, residual)[0]

    def _equals(self, decoder: Any) -> bool:
        """Whether each layer, and the decoder as a whole, gives what transformers' own gives."""
        weight = decoder.embed_tokens.weight
        token_ids = torch.arange(_NUM_PROBE_ROWS, device=weight.device) % weight.shape[0]
        positions = torch.arange(_NUM_PROBE_ROWS, device=weight.device) % self.rotary.num_positions
        probe = OwnRows.new(self.kernels)
        pairs: list[tuple[Tensor, Tensor]] = []

        def compare(layer: FusedLayer, hidden: Tensor, output: Tensor) -> None:
            own, residual = layer(hidden[0], None, positions, self.rotary, probe)
            pairs.append((own + residual, output[0]))

        hooks = [
            original.register_forward_hook(lambda _, args, output, layer=layer: compare(layer, args[0], output))
            for original, layer in zip(decoder.layers, self._layers)
        ]
        try:
            with torch.inference_mode():
                own = self.forward(token_ids, positions, probe)
                whole = decoder(
                    input_ids=token_ids[None], position_ids=positions[None], use_cache=False, paged=probe
                ).last_hidden_state[0]
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            _logger.info("%s is not fused: %s", type(decoder).__name__, error)
            return False
        finally:
            for hook in hooks:
                hook.remove()
        is_equal = all(is_close(*pair) for pair in pairs) and is_close(own, whole, _LOOSE)
        if not is_equal:
            _logger.info("%s is not fused: its layers compute something else", type(decoder).__name__)
        return is_equal and len(pairs) == len(self._layers)


class FusedModules:
    """MTP modules in fused form; embedding and rotary embedding are the target's."""

    def __init__(self, mtp: Any, layers: Sequence[FusedLayer], rotary: RotaryTable, kernels: Kernels) -> None:
        self._mtp = mtp
        self._layers = layers
        self._rotary = rotary
        self._kernels = kernels
        self._norms = [
            tuple(FusedNorm(norm, kernels) for norm in (layer.enorm, layer.hnorm, layer.post_norm))
            for layer in mtp.layers
        ]
        self._projections: list[nn.Module] = [layer.eh_proj for layer in mtp.layers]
        self._is_hidden_first = bool(getattr(mtp.config, "mtp_hidden_states_first", False))

    @classmethod
    def of(cls, mtp: MtpModel, target: FusedDecoder, *, is_packed: bool = False) -> FusedModules | None:
        """The fused form of modules whose target is fused; None if they are of another kind. is_packed: as there."""
        norms = [norm for layer in mtp.layers for norm in (layer.enorm, layer.hnorm, layer.post_norm)]
        if mtp.use_shared_post_norm or mtp.has_per_layer_rope or not all(is_plain_norm(norm) for norm in norms):
            return None
        blocks: list[nn.Module] = [layer.get_submodule("mtp_block") for layer in mtp.layers]
        layers = [FusedLayer.of(block, target.kernels) for block in blocks]
        whole = [layer for layer in layers if layer is not None]
        if len(whole) < len(layers):
            return None
        fused = cls(mtp, whole, target.rotary, target.kernels)
        if is_packed:
            fused._pack()
        return fused

    def _pack(self) -> None:
        for layer in self._layers:
            layer.pack()
        self._projections = [pack(projection) for projection in self._projections]

    def forward(
        self, module: int, token_ids: Tensor, positions: Tensor, hidden: Tensor, paged: PagedAttention
    ) -> Tensor:
        """As `MtpModules.forward`."""
        embed_norm, hidden_norm, post_norm = self._norms[module]
        embeddings: Tensor = self._mtp.embed_tokens(token_ids)
        parts = [(embeddings, embed_norm.weight), (hidden, hidden_norm.weight)]
        (first, first_weight), (second, second_weight) = parts[::-1] if self._is_hidden_first else parts
        joined = self._kernels.join_rms_norms(first, second, first_weight, second_weight, embed_norm.eps)
        projected = apply_linear(self._projections[module], joined, self._kernels)
        output, residual = self._layers[module](projected, None, positions, self._rotary, paged)
        return post_norm(output, residual)[0]


def is_close(own: Tensor, reference: Tensor, tolerance: float | None = None) -> bool:
    """Whether rows [T, H] of two ways to compute them are the same but for rounding."""
    difference = (own.double() - reference.double()).norm(dim=-1)
    tolerance = _TOLERANCE[own.dtype] if tolerance is None else tolerance
    return bool((difference <= tolerance * reference.double().norm(dim=-1)).all())


@dataclass(frozen=True)
class OwnRows(PagedAttention):
    """Stands in for a cache: the rows of the pass attend to each other and to nothing else."""

    @classmethod
    def new(cls, kernels: Kernels) -> OwnRows:
        return cls(kv=(), rows=(), kernels=kernels)

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        terms: ScoreTerms = PLAIN,
    ) -> Tensor:
        if terms is not PLAIN:
            raise ValueError("attention with other terms is not fused")
        fold = query.shape[1] // key.shape[1]
        key, value = (rows.repeat_interleave(fold, dim=1) for rows in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2)

    def attend_rotated(self, layer_idx: int, qkv: Tensor, rotation: Rotation, scale: float) -> Tensor:
        assert self.kernels is not None
        num_rows, width = qkv.shape[0], rotation.num_kv_heads * rotation.head_dim
        keys, values = (qkv.new_empty(num_rows, width) for _ in range(2))
        slots = torch.arange(num_rows, device=qkv.device)
        query = rotation.apply(self.kernels, qkv, keys, values, slots)
        kv_shape = (1, num_rows, rotation.num_kv_heads, rotation.head_dim)
        query, keys, values = query[None].transpose(1, 2), *(x.view(kv_shape).transpose(1, 2) for x in (keys, values))
        return self.attend(layer_idx, query, keys, values, scale, None)[0].flatten(1)


def _has_rotary_by_layer(decoder: Any) -> bool:
    parameters = getattr(decoder.config, "rope_parameters", None) or {}
    return len(decoder.config.nested_rope_parameter_keys(parameters)) > 0
