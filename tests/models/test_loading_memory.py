"""Loading takes little more memory than the model: nothing is read twice, and nothing is copied that can be shared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families.checkpoints_inkling import tiny_inkling
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, tiny_llama

from foredraft.models.loader import load_checkpoint

# Weights that stay as they are stored are mapped from the file, and count once they are looked at.
PROBE = """
import json, sys
import torch
import transformers.models.inkling.modeling_inkling, transformers.models.llama.modeling_llama
from foredraft.models.loader import load_checkpoint

def status(name):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(name + ":"))

before = status("VmRSS")
loaded = load_checkpoint(sys.argv[1], dtype=torch.float32, device=torch.device("cpu"))
weights = {t.data_ptr(): t for m in (loaded.target, loaded.mtp) for t in (*m.parameters(), *m.buffers())}
looked_at = [float(t.detach().flatten()[::64].sum()) for t in weights.values()]
size = sum(t.numel() * t.element_size() for t in weights.values())
print(json.dumps({"size": size, "peak": status("VmHWM") - before}))
"""


def in_bfloat16(path: Path) -> Path:
    """The same checkpoint, stored in half the bytes."""
    edit_config(path, dtype="bfloat16")
    for file in path.glob("*.safetensors"):
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt"})
    return path


SIZES: dict[str, Any] = {"hidden_size": 768, "vocab_size": 16000}
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llama": partial(tiny_llama, num_layers=3, **SIZES),
    "llama in bfloat16": lambda path: in_bfloat16(BUILDERS["llama"](path)),
    "inkling": partial(tiny_inkling, num_modules=2, intermediate_size=1536, moe_intermediate_size=512, **SIZES),
}


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux")
@pytest.mark.parametrize("kind", BUILDERS)
def test_the_peak_is_below_a_fifth_more_than_the_model(tmp_path: Path, kind: str) -> None:
    """In float32, whatever it is stored in."""
    path = BUILDERS[kind](tmp_path / "model")
    output = subprocess.run([sys.executable, "-c", PROBE, str(path)], check=True, capture_output=True, text=True)
    found = json.loads(output.stdout.splitlines()[-1])
    assert found["size"] > 150 * 2**20, "too small to tell"
    assert found["peak"] > 0.9 * found["size"], "not all was counted"
    assert found["peak"] < 1.2 * found["size"]


def test_modules_share_a_normed_embedding(tmp_path: Path) -> None:
    """`MtpModel` by itself copies it, to leave out the norm."""
    path = tiny_inkling(tmp_path / "model", num_modules=2)
    loaded = load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.mtp is not None
    embedding = loaded.target.get_input_embeddings()
    own = loaded.mtp.embed_tokens
    assert own.get_parameter("weight").data_ptr() == embedding.get_parameter("weight").data_ptr()
    token_ids = torch.arange(8)
    with torch.inference_mode():
        assert torch.equal(own(token_ids), embedding.get_parameter("weight")[:8]), "without the norm"
        assert not torch.equal(embedding(token_ids), own(token_ids)), "which the target's still has"
