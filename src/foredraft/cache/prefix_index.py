"""Which tokens the cached blocks hold: a tree of full blocks, compared token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PartKey = tuple[int, tuple[int, ...]]
"""Group number, and the tokens after the block that its rows depend on as well: () for the target's."""


class CachedBlock:
    """The rows of one block of one group, immutable, wherever they are: in a device block, a host block or both."""

    __slots__ = ("block", "host_block", "key", "node")

    def __init__(self, node: PrefixNode, key: PartKey) -> None:
        self.node = node
        self.key = key
        self.block: int | None = None
        self.host_block: int | None = None

    @property
    def group(self) -> int:
        return self.key[0]


class PrefixNode:
    """One full block of tokens that follows those of `parent`; a root stands for a salt and holds no tokens.

    parts: what is cached of it. num_users: requests whose last published block this is; it stays in the tree for them.
    """

    __slots__ = ("children", "num_users", "parent", "parts", "salt", "token_ids")

    def __init__(self, parent: PrefixNode | None, salt: str | None, token_ids: tuple[int, ...]) -> None:
        self.parent = parent
        self.salt = salt
        self.token_ids = token_ids
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.parts: dict[PartKey, CachedBlock] = {}
        self.num_users = 0


class PrefixIndex:
    """The tree. A child is found by its tokens themselves, so that no collision of hashes can mix up two prefixes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[str | None, PrefixNode] = {}

    def child(self, parent: PrefixNode | None, salt: str | None, token_ids: tuple[int, ...]) -> PrefixNode:
        """The node of a block after `parent` (None: the first block under `salt`), made if it is not there."""
        if parent is None:
            parent = self._roots.get(salt) or self._roots.setdefault(salt, PrefixNode(None, salt, ()))
        node = parent.children.get(token_ids)
        if node is None:
            node = parent.children[token_ids] = PrefixNode(parent, salt, token_ids)
        return node

    def walk(self, salt: str | None, token_ids: Sequence[int]) -> list[PrefixNode]:
        """The nodes of the leading full blocks of a sequence, as far as the tree has them."""
        node = self._roots.get(salt)
        nodes: list[PrefixNode] = []
        size = self._block_size
        for start in range(0, len(token_ids) - size + 1, size):
            if node is None or (node := node.children.get(tuple(token_ids[start : start + size]))) is None:
                break
            nodes.append(node)
        return nodes

    def remove(self, part: CachedBlock) -> None:
        """Forget a part whose rows are nowhere any more, and nodes that then stand for nothing."""
        node = part.node
        del node.parts[part.key]
        self.prune(node)

    def prune(self, node: PrefixNode) -> None:
        """Take `node`, and then those above it, out of the tree where they have no parts, children or users."""
        while not (node.parts or node.children or node.num_users):
            if node.parent is None:
                if self._roots.get(node.salt) is node:  # else the tree was cleared meanwhile
                    del self._roots[node.salt]
                return
            node.parent.children.pop(node.token_ids, None)
            node = node.parent

    def clear(self) -> None:
        """Forget all; what requests hold stays theirs, and is not found any more."""
        self._roots.clear()

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes but the roots, parents before children."""
        pending = list(self._roots.values())
        while pending:
            children = pending.pop().children.values()
            yield from children
            pending += children
