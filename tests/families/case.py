"""A family of models as the contract sees it: a tiny checkpoint, the engines over it, and what they must agree with."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from reference import Reference
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scripted import greedy_sequence
from tiny_models import SHARED_PREFIXES, new_mtp_model
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.request import Request

COPIES = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
"""How the names end of what published modules repeat of their target."""


class TransformersReference(Reference):
    """The target and the modules as transformers itself runs them: eager attention, the whole history in every call.

    A family whose modules transformers does not have, or loads otherwise, overrides `load_modules`, `logits` or
    `draft_logits`, of which the contract calls nothing else. is_chained: a module reads the output of the one before
    it; otherwise every module reads the target's.
    """

    is_chained: ClassVar[bool] = True

    def __init__(self, directory: Path, num_modules: int) -> None:
        super().__init__(directory)
        self._decoder: Any = self.target.get_decoder()  # type: ignore[no-untyped-call]
        self.mtp = self.load_modules(directory, num_modules)

    def load_modules(self, directory: Path, num_modules: int) -> Any:
        """The modules in mtp.safetensors, else those that transformers finds as the layers behind the target's."""
        file = directory / "mtp.safetensors"
        if not file.is_file():
            config = self.target.config.get_text_config()
            config.num_mtp_layers = num_modules
            layers = range(config.num_hidden_layers, config.num_hidden_layers + num_modules)
            self.target._keys_to_ignore_on_load_unexpected = [rf"layers\.{layer}\..*" for layer in layers]
            return MtpModel.from_pretrained(self.target).train(False)
        modules = new_mtp_model(self.target, num_modules)
        report = modules.load_state_dict(load_file(file), strict=False)
        assert not report.unexpected_keys
        assert all(name.startswith(SHARED_PREFIXES) for name in report.missing_keys)
        return modules

    @torch.inference_mode()
    def draft_logits(self, token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Tensor:
        """What each draft after `token_ids` is chosen from, if those before it are as given: [num drafts, vocab_size].

        The target has run on all tokens but the last. A single module that is to draft more than one token reads its
        own last output in the place of the target's, one row further each time.
        """
        tokens = torch.tensor([[*token_ids, *draft_token_ids]])
        positions = torch.arange(tokens.shape[1])[None]
        hidden: Tensor = self._decoder(tokens[:, : len(token_ids) - 1], use_cache=False).last_hidden_state
        is_alone = len(draft_token_ids) > len(self.mtp.layers) == 1
        logits = []
        for index in range(len(draft_token_ids)):
            module, first = (0, 1) if is_alone else (index, index + 1)
            rows = slice(first, first + hidden.shape[1])
            cache = MtpCache(config=self.mtp.config)  # by it a module knows at which positions its rows lie
            output = self.mtp.forward_layer(module, hidden, positions[:, rows], cache, input_ids=tokens[:, rows])
            logits.append(self.mtp._project_to_logits(output[:, -1:])[0, 0])
            if is_alone:
                hidden = torch.cat([hidden, output[:, -1:]], dim=1)
            elif self.is_chained:
                hidden = output
        return torch.stack(logits)


def no_other_state(engine: Engine, request: Request) -> Mapping[str, Tensor]:
    """Of a family that keeps nothing for a request but the rows of its blocks."""
    return {}


@dataclass(frozen=True)
class FamilyCase:
    """What the contract must know of a family.

    build: writes a tiny random float32 checkpoint in the family's published layout to a directory that it makes, and
    returns that; its greedy continuations should have no near ties. depths: how many drafts a step the tests ask for; a
    single module may draft more than one. reference: made from the directory and the number of modules.
    module_prefix: how the names of a module's own tensors begin in the checkpoint, by its number from 0. aliases: by
    the last part of a published name of a module, what messages call it where that is another word; target_aliases: the
    same of the target.
    other_state: what is kept for a running request beside the rows of its blocks, by name; the same is compared of one
    prefill of all its tokens. settings: of all engines. bound: how far rounding takes cached rows apart, relative to
    the largest number. is_resident: decodes may run with their state on the device. row_id: what prompts have in the
    place of a token: itself, or one of the rows that a tower gives.
    """

    name: str
    build: Callable[[Path], Path]
    num_modules: int
    depths: tuple[int, ...]
    vocab_size: int = 64
    reference: Callable[[Path, int], Reference] = TransformersReference
    module_prefix: Callable[[int], str] = "layers.{}.".format
    aliases: Mapping[str, str] = field(default_factory=dict)
    target_aliases: Mapping[str, str] = field(default_factory=dict)
    other_state: Callable[[Engine, Request], Mapping[str, Tensor]] = no_other_state
    settings: Mapping[str, Any] = field(default_factory=dict)
    bound: float = 1e-5
    is_resident: bool = True
    row_id: Callable[[int], int] = int


class FamilyModel:
    """The checkpoint of a case: written, loaded, and run by the reference; made once for all tests of a class."""

    def __init__(self, case: FamilyCase, directory: Path) -> None:
        self.case = case
        self.path = case.build(directory)
        self.loaded = load(self.path)
        self.reference = case.reference(self.path, case.num_modules)
        self._sequences: dict[tuple[int, ...], list[int]] = {}

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(1000 * length + seed)
        token_ids = torch.randint(self.case.vocab_size, (length,), generator=generator).tolist()
        return [self.case.row_id(token_id) for token_id in token_ids]

    def engine(self, depth: int, **settings: Any) -> Engine:
        """An engine with room for all, unless the settings say otherwise. Skips a test of an execution there is not."""
        if settings.get("execution") == "overlapped" and not self.case.is_resident:
            pytest.skip("its decodes are run by the host")
        room = {"block_size": 4, "num_blocks": 128, "max_num_seqs": 3, "max_model_len": 96, **self.case.settings}
        return build_engine(self.loaded, EngineConfig(num_speculative_tokens=depth, **(room | settings)))

    @cached_property
    def plain_engine(self) -> Engine:
        """Runs transformers' own layers by the host, one request at a time, for whole prefills and plain decoding."""
        settings = {"num_blocks": 64, "block_size": 8, "max_num_seqs": 1, "enable_prefix_caching": False}
        return self.engine(max(self.case.depths), **settings, execution="reference", max_model_len=None)

    def plain_sequence(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The prompt and its greedy continuation without drafts; that this is the reference's, a test tells."""
        key = (*prompt, num_tokens)
        if key not in self._sequences:
            self._sequences[key] = greedy_sequence(self.plain_engine, prompt, num_tokens)
        return self._sequences[key]

    def module_tensors(self, module: int) -> dict[str, Path]:
        """The file of every tensor that is a module's own, by its published name."""
        prefix = self.case.module_prefix(module)
        names = {name: file for name, file in self.tensors().items() if name.startswith(prefix)}
        assert names, f"no tensor is named {prefix}..."
        return {name: file for name, file in names.items() if not name.endswith(COPIES)}

    def target_tensors(self) -> dict[str, Path]:
        """The file of every tensor that the target's layers read."""
        prefixes = tuple(self.case.module_prefix(module) for module in range(self.case.num_modules))
        layers = {n: f for n, f in self.tensors().items() if re.search(r"(model|backbone|llm)\.layers\.", n)}
        assert layers, "no tensor is named model.layers..., backbone.layers... or llm.layers..."
        return {name: file for name, file in layers.items() if not name.startswith(prefixes)}

    def tensors(self) -> dict[str, Path]:
        """The file of every tensor of the checkpoint."""
        found = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found.update(dict.fromkeys(opened.keys(), file))
        return found

    def without(self, directory: Path, name: str, file: Path) -> Path:
        """A copy of the checkpoint that lacks a tensor."""
        return self.damaged(directory, file, lambda tensors: tensors.pop(name))

    def damaged(self, directory: Path, file: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
        """A copy of the checkpoint, with the tensors of one file changed."""
        shutil.copytree(self.path, directory)
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, directory / file.name, metadata={"format": "pt"})
        return directory


def load(path: Path, **options: Any) -> LoadedModel:
    return load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"), **options)
