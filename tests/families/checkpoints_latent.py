"""Tiny random checkpoints of models with latent attention, their modules inside as the layers behind the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import write_checkpoint
from transformers import AutoConfig

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}
"""With unequal scales, so that one is left for cosines and sines."""


def tiny_deepseek_v3(path: Path, *, num_modules: int = 1, **changes: Any) -> Path:
    """Queries through a latent, pairs side by side, experts in groups behind one dense layer."""
    return _write(path, "deepseek_v3", num_modules, n_group=2, topk_group=1, rope_scaling=YARN, **changes)


def tiny_sarvam(path: Path) -> Path:
    """Queries without a latent, pairs half a row apart."""
    return _write(path, "sarvam_mla", 1, q_lora_rank=None, rope_interleave=False)


def tiny_glm4_moe_lite(path: Path) -> Path:
    """GLM-4.7-Flash."""
    return _write(path, "glm4_moe_lite", 1, mlp_layer_types=["dense", "sparse"])


def tiny_deepseek_v32(path: Path, **changes: Any) -> Path:
    """Each row attends to four."""
    return _write(path, "deepseek_v32", 1, **(_indexer() | {"n_group": 2, "topk_group": 1} | changes))


def tiny_glm_moe_dsa(path: Path, *, num_modules: int = 1, **changes: Any) -> Path:
    """GLM-5: the second of three layers attends to the rows that the first has chosen."""
    sharing = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
    return _write(path, "glm_moe_dsa", num_modules, **_indexer(), **(sharing | changes))


def _indexer() -> dict[str, Any]:
    """With so many heads that they never all say 0 of a row: which of equal rows is chosen transformers leaves open."""
    return {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 32}


def _write(path: Path, model_type: str, num_modules: int, **changes: Any) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": num_modules,
    }
    config = AutoConfig.for_model(model_type, **(sizes | changes))
    return write_checkpoint(path, config, num_modules, mtp_names="model.layers")
