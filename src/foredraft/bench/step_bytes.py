"""What a decode step must read from memory, summed over the weights that a model really has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from foredraft import LLM
from foredraft.cache.groups import CacheLayout, KVShape


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step reads at least, each once: the weights of each part, then keys and values of all requests.

    Rows of the embedding, hidden states and what is written are not counted: beside these they are nothing.
    """

    target: int
    head: int
    modules: int
    draft_heads: int
    target_kv: int
    module_kv: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model's parts, and what its layers store for a token.

    target: its layers and norms, head: the target's own, modules: each by itself, draft_head: what one draft is chosen
    with; experts are counted all, whether a step reads them or not. shapes: of each target layer and of each module;
    kv_itemsize: bytes of a number in the cache.
    """

    target: int
    head: int
    modules: tuple[int, ...]
    draft_head: int
    target_shapes: tuple[KVShape, ...]
    module_shapes: tuple[KVShape, ...]
    kv_itemsize: int

    @classmethod
    def of(cls, llm: LLM) -> ModelBytes:
        """Of the model that `llm` has loaded, with the draft head that its settings ask for."""
        loaded, layout = llm.loaded, llm.engine.runner.storage.layout
        target, mtp = loaded.target, loaded.mtp
        weights = model_weights(target, () if mtp is None else mtp.layers, _shared_norm(mtp))
        head = llm.engine.runner.draft_head
        return cls.from_weights(*weights, 0 if head is None else head.num_bytes, layout)

    @classmethod
    def from_weights(
        cls, target: int, head: int, modules: tuple[int, ...], draft_head: int, layout: CacheLayout
    ) -> ModelBytes:
        """From bytes of weights and the layout of the cache."""
        return cls(target, head, modules, draft_head, layout.target, layout.modules, layout.dtype.itemsize)

    def step(self, num_requests: int, context: float, depth: int) -> StepBytes:
        """Of a cycle with `depth` drafts in which each request has `context` tokens.

        A draft beyond the last module runs it again: a single module may make several.
        """
        passes = [min(index, len(self.modules) - 1) for index in range(depth)]
        return StepBytes(
            target=self.target,
            head=self.head,
            modules=sum(self.modules[index] for index in passes),
            draft_heads=depth * self.draft_head,
            target_kv=self._kv(self.target_shapes, num_requests, context),
            module_kv=self._kv([self.module_shapes[index] for index in passes], num_requests, context),
        )

    def _kv(self, shapes: Sequence[KVShape], num_requests: int, context: float) -> int:
        rows = (context if shape.window is None else min(context, shape.window) for shape in shapes)
        return round(num_requests * self.kv_itemsize * sum(row * shape.width for row, shape in zip(rows, shapes)))


def model_weights(
    target: Any, modules: Iterable[nn.Module] = (), shared_norm: nn.Module | None = None
) -> tuple[int, int, tuple[int, ...]]:
    """Bytes of the target without its embedding and head, of its head, and of each module.

    target: a decoder of transformers. A head that is tied to the embedding is read whole, the embedding is not.
    shared_norm: what runs after each module.
    """
    head = target.get_output_embeddings()
    in_head = set(map(id, _tensors(head)))
    in_embeddings = {id(each) for part in target.modules() if isinstance(part, nn.Embedding) for each in _tensors(part)}
    own = [tensor for tensor in _tensors(target) if id(tensor) not in in_head | in_embeddings]
    after_each = 0 if shared_norm is None else _num_bytes(_tensors(shared_norm))
    return (
        _num_bytes(own),
        _num_bytes(_tensors(head)),
        tuple(_num_bytes(_tensors(module)) + after_each for module in modules),
    )


def _shared_norm(mtp: Any) -> nn.Module | None:
    return mtp.shared_post_norm if mtp is not None and mtp.use_shared_post_norm else None


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers (which is where weights in 8 bits may be), each once."""
    yield from {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
