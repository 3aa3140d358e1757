"""Inkling: short convolutions, a score bias by distance, and heads of two sizes.

Beyond the rule:

- Each layer has four short convolutions, over its keys, its values, and the outputs of attention and MLP. Their inputs
  are kept row by row like keys and values, in a cache group of their own that looks back as far as the kernel. So a
  rejected row needs no rollback, and a window may begin at any row.
- There is no rotary embedding. A row's relative states give a bias for each distance below `rel_extent`; full layers
  scale queries and bias by the logarithm of the position, if the configuration asks for it. In a module that is the
  position of the token that the row reads.
- Layers of kind `hybrid` attend to all rows, `hybrid_sliding` to a window, with other numbers of heads. Modules have
  their own pattern.
- The target's embedding is normed, that of the modules is not. The modules' projection takes the hidden state first;
  the output of one norm after every depth (`chain_hidden_post_norm`) goes both to the head and to the next depth.
- The head divides its input (muP) and ends with the vocabulary proper.
- Prompts show images and sound. A tower gives the embeddings for them, which the target's embedding norm leaves alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.models.inkling.modeling_inkling import InklingAttention, InklingDecoderLayer, InklingShortConvolution

from foredraft.media import Media, MediaKind
from foredraft.models.attention import PagedAttention, ScoreTerms
from foredraft.models.families.family import Family, replace_parts

PATCHES_AT_ONCE, FRAMES_AT_ONCE = 512, 64
"""Neither see each other in a tower. Parts of them bound the memory that it takes, for a frame about a megabyte."""


class Inkling(Family):
    """thinkingmachines/Inkling, and its text model alone."""

    layer_kinds: ClassVar[frozenset[str]] = frozenset({"hybrid", "hybrid_sliding"})

    def model_class(self, config: PreTrainedConfig) -> Any:
        mapping = MODEL_FOR_CAUSAL_LM_MAPPING if _is_text(config) else MODEL_FOR_MULTIMODAL_LM_MAPPING
        return mapping.get(type(config), None)

    def refusal(self, config: PreTrainedConfig) -> str | None:
        text_config: Any = config.get_text_config(decoder=True)
        return None if text_config.n_shared_experts else "n_shared_experts must be at least 1"

    def adapt(self, model: nn.Module) -> None:
        replace_parts(model, InklingDecoderLayer, PagedLayer)

    def head(self, model: PreTrainedModel) -> nn.Module:
        config: Any = model.config.get_text_config(decoder=True)
        weight: Tensor = super().head(model).get_parameter("weight")
        return ScaledHead(weight[: config.unpadded_vocab_size], config.logits_mup_width_multiplier)

    def placeholders(self, config: PreTrainedConfig) -> Mapping[MediaKind, int]:
        if _is_text(config):
            return {}
        whole: Any = config
        return {MediaKind.IMAGE: whole.image_token_id, MediaKind.AUDIO: whole.audio_token_id}

    def encode(self, model: PreTrainedModel, kind: MediaKind, features: Mapping[str, Tensor]) -> Tensor:
        whole: Any = model
        if kind is MediaKind.IMAGE:
            patches = torch.split(features["pixel_values"], PATCHES_AT_ONCE)
            parts = (whole.get_image_features(part.to(model.device, model.dtype)).pooler_output for part in patches)
            return torch.cat([part.flatten(0, 1) for part in parts])
        frames = torch.split(features["audio_input_ids"].flatten(0, -2), FRAMES_AT_ONCE)
        encode = whole.model.get_audio_features
        return torch.cat([encode(part[None].to(model.device)).last_hidden_state for part in frames])

    def media_fault(self, config: PreTrainedConfig, media: Media) -> str | None:
        whole: Any = config
        if media.kind is MediaKind.IMAGE:
            vision = whole.vision_config
            side = vision.patch_size
            shape = [media.num_tokens, vision.temporal_patch_size, side, side, vision.num_channels]
            pixels = media.features.get("pixel_values")
            is_right = pixels is not None and list(pixels.shape) == shape and bool(pixels.isfinite().all())
            return None if is_right else f"pixel_values must be finite numbers {shape}"
        shape, most = [1, media.num_tokens, whole.audio_config.n_mel_bins], whole.audio_config.mel_vocab_size - 1
        bins = media.features.get("audio_input_ids")
        is_right = bins is not None and bins.dtype in (torch.int32, torch.int64) and list(bins.shape) == shape
        if bins is None or not is_right or not 0 <= int(bins.min()) <= int(bins.max()) <= most:
            return f"audio_input_ids must be integers {shape} from 0 to {most}"
        return None


def _is_text(config: PreTrainedConfig) -> bool:
    return config.model_type == "inkling_text"


class ScaledHead(nn.Module):
    """A linear layer without bias over inputs that are divided by a constant."""

    def __init__(self, weight: Tensor, divisor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.divisor = divisor

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, V]."""
        return F.linear(hidden / self.divisor, self.weight)


class PagedConvolution(nn.Module):
    """A causal depthwise convolution over the rows of each sequence, added to its input; computed in float32."""

    def __init__(self, convolution: InklingShortConvolution) -> None:
        super().__init__()
        self.conv1d = convolution.conv1d
        self._layer_idx = convolution.layer_idx
        self._name = f"convolution {convolution.conv_idx}"
        self._kernel_size = convolution.conv_kernel_size

    def forward(self, rows: Tensor, paged: PagedAttention) -> Tensor:
        """rows [T, width] -> [T, width]."""
        seen = paged.with_earlier(self._layer_idx, self._name, rows, self._kernel_size).float()
        kernel = self.conv1d.weight.squeeze(1).float().t()  # [kernel size, width], the row's own last
        convolved: Tensor = (seen * kernel).sum(dim=1)
        return (convolved + rows.float()).to(rows.dtype)


class PagedInklingAttention(nn.Module):
    """`InklingAttention` over paged rows, with its parts."""

    def __init__(self, attention: InklingAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.r_proj, self.o_proj = attention.r_proj, attention.o_proj
        self.k_sconv, self.v_sconv = PagedConvolution(attention.k_sconv), PagedConvolution(attention.v_sconv)
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.rel_logits_proj = attention.rel_logits_proj
        self._layer_idx, self._head_dim, self._scale = attention.layer_idx, attention.head_dim, attention.scaling
        self._window = attention.sliding_window
        config = attention.config
        self._floor = None if attention.is_sliding else config.log_scaling_n_floor
        self._alpha = config.log_scaling_alpha

    def forward(self, hidden: Tensor, paged: PagedAttention) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]."""
        num_rows = len(hidden)
        query = self.q_norm(self.q_proj(hidden).view(num_rows, -1, self._head_dim))
        key = self.k_norm(self.k_sconv(self.k_proj(hidden), paged).view(num_rows, -1, self._head_dim))
        value = self.v_sconv(self.v_proj(hidden), paged).view(num_rows, -1, self._head_dim)
        bias = self.r_proj(hidden).view(num_rows, query.shape[1], -1) @ self.rel_logits_proj.proj
        if self._floor is not None:
            factor = self._growth(paged, self._floor)
            query, bias = ((rows.float() * factor).to(rows.dtype) for rows in (query, bias))
        query, key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
        attended = paged.attend(self._layer_idx, query, key, value, self._scale, self._window, ScoreTerms(bias=bias))
        output: Tensor = self.o_proj(attended.reshape(num_rows, -1))
        return output

    def _growth(self, paged: PagedAttention, floor: int) -> Tensor:
        """With the logarithm of how much may be seen: [T, 1, 1] float32."""
        assert paged.positions is not None
        seen = (paged.positions + 1).float()
        return (1.0 + self._alpha * torch.log((seen / floor).clamp(min=1.0))).view(-1, 1, 1)


class PagedLayer(nn.Module):
    """`InklingDecoderLayer` over paged rows, with its parts."""

    def __init__(self, layer: InklingDecoderLayer) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.self_attn, self.mlp = PagedInklingAttention(layer.self_attn), layer.mlp
        self.attn_sconv, self.mlp_sconv = PagedConvolution(layer.attn_sconv), PagedConvolution(layer.mlp_sconv)

    def forward(self, hidden_states: Tensor, *, paged: PagedAttention, **ignored: Any) -> Tensor:
        """hidden_states [1, T, hidden_size], as transformers calls a layer; masks and positions come with `paged`."""
        hidden = hidden_states[0]
        hidden = hidden + self.attn_sconv(self.self_attn(self.input_layernorm(hidden), paged), paged)
        mixed = self.mlp(self.post_attention_layernorm(hidden).unsqueeze(0))[0]
        output: Tensor = hidden + self.mlp_sconv(mixed, paged)
        return output.unsqueeze(0)
