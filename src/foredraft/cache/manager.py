"""Who holds which blocks: one table for each request and group, and the blocks that later requests may share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foredraft.cache.block_pool import RESERVED_BLOCK, BlockPool
from foredraft.cache.block_tables import BlockTables, RowDemand
from foredraft.cache.groups import CacheLayout
from foredraft.cache.integrity import check_integrity
from foredraft.cache.prefix_index import CachedBlock, PartKey, PrefixIndex, PrefixNode
from foredraft.cache.prefix_match import PrefixMatch, match_prefix
from foredraft.exactness import ExactRows
from foredraft.plan import BlockCopy, CopyKind


class CacheManager:
    """Gives requests room for their rows, and finds rows that others have computed. Nothing else touches blocks.

    A full block of committed tokens is published: it is immutable from then on, and any request with the same tokens
    (and the same salt) may refer to it. Module rows depend on the tokens after their own, so a module block is found
    by its own tokens and the next `depth` ones. A block that nobody refers to stays until its place is needed.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: Sequence[int],
        block_size: int,
        *,
        is_shared: bool = True,
        num_host_blocks: Sequence[int] = (),
    ) -> None:
        self.layout = layout
        self.block_size = block_size
        self.is_shared = is_shared
        self._num_blocks = tuple(num_blocks)
        self._num_host_blocks = tuple(num_host_blocks)
        self.clear()

    def clear(self) -> None:
        """Begin anew: nobody holds anything, and nothing is cached."""
        self.pools: tuple[BlockPool[CachedBlock], ...] = tuple(
            BlockPool(count, self._evict) for count in self._num_blocks
        )
        self._host_pools: tuple[BlockPool[CachedBlock], ...] = tuple(
            BlockPool(count, self._evict_from_host) for count in self._num_host_blocks
        )
        self._index = PrefixIndex(self.block_size)
        self._tables: dict[str, BlockTables] = {}
        self._copies: list[BlockCopy] = []

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, in the group that is fullest: from 0 to 1."""
        return max(1 - pool.num_free_blocks / max(1, pool.num_usable_blocks) for pool in self.pools)

    # -- finding what is cached ----------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], salt: str | None, module_depth: int) -> PrefixMatch:
        """How much of a sequence is cached; with `module_depth` 0 the modules' rows are not looked for.

        Changes nothing, so that it may be asked again by a request that has to wait.
        """
        nodes = self._index.walk(salt, token_ids) if self.is_shared else []
        return match_prefix(self.layout, self.block_size, nodes, token_ids, module_depth)

    def _num_rows(self, group: int) -> int:
        """How many rows of a sequence one block of a group covers."""
        return self.block_size * self.layout.groups[group].span

    def _first_block(self, group: int, next_row: int) -> int:
        return self.layout.groups[group].first_kept_row(next_row) // self._num_rows(group)

    # -- room for rows -------------------------------------------------------------------------------------------------

    def admit(self, request_id: str, salt: str | None, match: PrefixMatch, demand: RowDemand) -> bool:
        """Give a new request what `match` found and room for the rest; all or nothing. False: not enough blocks."""
        groups = range(len(self.layout.groups))
        found = (*match.target_parts, *match.module_parts)
        tables = BlockTables(salt, [[] for _ in groups], [0 for _ in groups], is_published=match.is_shared)
        origin = match.module_origin // self.block_size
        tables.num_shared_module_blocks = max(origin, match.num_module_rows // self.block_size)
        for group in groups:
            is_module = group in self.layout.module_groups
            num_rows, begin = (match.num_module_rows, origin) if is_module else (match.num_rows, 0)
            tables.first[group] = max(begin := match.begins.get(group, begin), self._first_block(group, num_rows))
            tables.blocks[group] = [RESERVED_BLOCK] * max(begin, num_rows // self._num_rows(group))
            on_device = [part.block for part in found[group].values() if part.block is not None]
            num_wanted = len(found[group]) - sum(not self.pools[group].is_free(block) for block in on_device)
            if num_wanted + self._num_missing(tables, group, demand) > self.pools[group].num_free_blocks:
                return False
        self._take(tables, found)
        self._extend(tables, demand)
        if match.donor is not None:
            self._copy_blocks(self._tables[match.donor], tables, match)
        tables.nodes = list(match.nodes)
        if tables.nodes:
            tables.nodes[-1].num_users += 1
        self._tables[request_id] = tables
        return True

    def _copy_blocks(self, donor: BlockTables, tables: BlockTables, match: PrefixMatch) -> None:
        """Copy the rows of a match that are in no block which may be shared."""
        for group in range(len(self.layout.groups)):
            is_module = group in self.layout.module_groups
            first = (match.num_module_rows if is_module else match.num_rows) // self.block_size
            end = -(-match.num_copied_rows // self.block_size)
            pairs = zip(donor.blocks[group][first:end], tables.blocks[group][first:end])
            self._copies += [BlockCopy(group, source, own, CopyKind.ON_DEVICE) for source, own in pairs]

    def _take(self, tables: BlockTables, found: Sequence[dict[int, CachedBlock]]) -> None:
        """Refer to the parts found. First all that are on the device: bringing others back must not evict them."""
        for group, parts in enumerate(found):
            for index, part in parts.items():
                if part.block is not None:
                    self.pools[group].take(part.block)
                    tables.blocks[group][index] = part.block
                else:
                    assert part.host_block is not None
                    self._host_pools[group].take(part.host_block)
        for group, parts in enumerate(found):
            for index, part in parts.items():
                if part.block is None:
                    tables.blocks[group][index] = self._bring_back(part)

    def _bring_back(self, part: CachedBlock) -> int:
        """Copy a part that is on the host only into a device block, and drop the reference to its host block."""
        assert part.host_block is not None
        pool = self.pools[part.group]
        part.block = pool.allocate(1)[0]
        pool.contents[part.block] = part
        self._copies.append(BlockCopy(part.group, part.host_block, part.block, CopyKind.TO_DEVICE))
        self._host_pools[part.group].release([part.host_block])
        return part.block

    def reserve(self, request_id: str, target_end: int, module_end: int) -> bool:
        """Make room for rows up to these of a request; all or nothing. False: not enough free blocks."""
        tables = self._tables[request_id]
        if target_end <= tables.target_end and module_end <= tables.module_end:
            return True
        demand = RowDemand(target_end, module_end, target_end, module_end)
        if any(self._num_missing(tables, g, demand) > pool.num_free_blocks for g, pool in enumerate(self.pools)):
            return False
        self._extend(tables, demand)
        return True

    def _num_missing(self, tables: BlockTables, group: int, demand: RowDemand) -> int:
        is_module, keeps_all = group in self.layout.module_groups, self.layout.groups[group].retention is None
        if is_module:
            num_rows = demand.module_total if keeps_all else demand.module_end
        else:
            num_rows = demand.target_total if keeps_all else demand.target_end
        return max(0, -(-num_rows // self._num_rows(group)) - len(tables.blocks[group]))

    def _extend(self, tables: BlockTables, demand: RowDemand) -> None:
        for group, pool in enumerate(self.pools):
            tables.blocks[group] += pool.allocate(self._num_missing(tables, group, demand))
        self._changed(tables)

    def _changed(self, tables: BlockTables) -> None:
        """Note what follows from the tables, so that a step that changes nothing costs nothing."""
        tables.frozen = None
        ends = [len(blocks) * self._num_rows(group) for group, blocks in enumerate(tables.blocks)]
        tables.target_end = min(ends[group] for group in self.layout.target_groups)
        tables.module_end = min((ends[group] for group in self.layout.module_groups), default=0)

    def renew_modules(self, request_id: str, first_row: int, *, keep_before: bool) -> int:
        """Give the module blocks from the one of `first_row` on back, so that fresh ones are written.

        keep_before: the blocks before it stay; otherwise the table begins there. Returns the first row that is lost.
        """
        tables = self._tables[request_id]
        index = first_row // self.block_size
        for group in self.layout.module_groups:
            blocks, first = tables.blocks[group], tables.first[group]
            start = max(first, index) if keep_before else first
            self.pools[group].release(reversed(blocks[start:]))
            del blocks[start:]
            if not keep_before:
                tables.blocks[group] = [RESERVED_BLOCK] * index
                tables.first[group] = index
        tables.num_shared_module_blocks = min(tables.num_shared_module_blocks, index) if keep_before else index
        self._changed(tables)
        return index * self.block_size

    def num_shared_module_rows(self, request_id: str) -> int:
        """Module rows before this one may be shared: they must not be written."""
        return self._tables[request_id].num_shared_module_blocks * self.block_size

    def retain(self, request_id: str, target_row: int, module_row: int) -> None:
        """Give back what no target row from `target_row` on and no module row from `module_row` on needs."""
        tables = self._tables[request_id]
        for number, group in enumerate(self.layout.groups):
            if group.retention is None:
                continue
            row = module_row if number in self.layout.module_groups else target_row
            blocks, first = tables.blocks[number], tables.first[number]
            index = min(self._first_block(number, row), len(blocks))
            if index > first:
                self.pools[number].release(blocks[first:index])
                blocks[first:index] = [RESERVED_BLOCK] * (index - first)
                tables.first[number] = index
                tables.frozen = None

    def release(self, request_id: str) -> None:
        """Give back all that a request holds; a request that holds nothing is fine. What is published stays cached."""
        tables = self._tables.pop(request_id, None)
        if tables is None:
            return
        for pool, blocks, first in zip(self.pools, tables.blocks, tables.first):
            pool.release(reversed(blocks[first:]))  # the end of a sequence is of use only together with its beginning
        self._leave(tables)

    def _leave(self, tables: BlockTables) -> None:
        if tables.nodes:
            tables.nodes[-1].num_users -= 1
            self._index.prune(tables.nodes[-1])

    def block_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The blocks of a request by group."""
        tables = self._tables[request_id]
        if tables.frozen is None:
            tables.frozen = tuple(map(tuple, tables.blocks))
        return tables.frozen

    def num_held_blocks(self, request_id: str) -> tuple[int, ...]:
        """How many blocks a request refers to, by group."""
        tables = self._tables[request_id]
        return tuple(len(blocks) - first for blocks, first in zip(tables.blocks, tables.first))

    # -- publishing ----------------------------------------------------------------------------------------------------

    def publish(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_rows: int,
        exact: ExactRows,
        depth: int,
        num_states: int = 0,
    ) -> None:
        """Let others find the full blocks among a request's rows.

        num_rows: target rows of committed tokens (c), num_states of which are in its states. A module block is
        published once modules 1..depth are exact to its end, for all modules that are.
        """
        tables = self._tables[request_id]
        if not (self.is_shared and tables.is_published):
            return
        if num_rows // self.block_size > len(tables.nodes):
            self._publish_target(tables, token_ids, num_rows // self.block_size)
        self._publish_states(tables, num_states)
        if depth and exact.num_exact_rows[depth - 1] // self.block_size > tables.num_shared_module_blocks:
            self._publish_modules(tables, token_ids, exact, depth)

    def _publish_modules(self, tables: BlockTables, token_ids: Sequence[int], exact: ExactRows, depth: int) -> None:
        size = self.block_size
        num_blocks = min(exact.num_exact_rows[depth - 1] // size, len(tables.nodes))
        for index in range(tables.num_shared_module_blocks, num_blocks):
            end = (index + 1) * size
            num_modules = sum(count >= end for count in exact.num_exact_rows)
            # Where modules began in the middle of a sequence, their first rows could not see all of their windows.
            if not exact.origin or index * size >= exact.origin + (self.layout.rebuild_rows[num_modules] or 0):
                following = tuple(token_ids[end : end + num_modules])
                for group in self.layout.module_groups:
                    self._offer(tables, group, index, (group, following))
            tables.num_shared_module_blocks = index + 1

    def _publish_target(self, tables: BlockTables, token_ids: Sequence[int], num_blocks: int) -> None:
        last = tables.nodes[-1] if tables.nodes else None
        size = self.block_size
        for index in range(len(tables.nodes), num_blocks):
            parent = tables.nodes[-1] if tables.nodes else None
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            tables.nodes.append(self._index.child(parent, tables.salt, tokens))
            for group in self.layout.target_groups:
                if self.layout.can_be_found(group, index, size):
                    self._offer(tables, group, index, (group, ()))
        tables.nodes[-1].num_users += 1
        if last is not None:
            last.num_users -= 1

    def _publish_states(self, tables: BlockTables, num_rows: int) -> None:
        """A state is found with the last block of tokens that it has seen."""
        if (group := self.layout.state_group) is not None:
            count = min(num_rows, len(tables.nodes) * self.block_size) // self._num_rows(group)
            for index in range(tables.num_shared_states, count):
                self._offer(tables, group, index, (group, ()))
            tables.num_shared_states = max(tables.num_shared_states, count)

    def _offer(self, tables: BlockTables, group: int, index: int, key: PartKey) -> None:
        """Publish one block, or use the one that was published first and give our own back."""
        if index < tables.first[group]:
            return
        pool, node = self.pools[group], tables.nodes[(index + 1) * self.layout.groups[group].span - 1]
        block = tables.blocks[group][index]
        part = node.parts.get(key)
        if part is None:
            part = node.parts[key] = CachedBlock(node, key)
        if part.block is None:
            part.block = block
            pool.contents[block] = part
        elif part.block != block:
            pool.take(part.block)
            tables.blocks[group][index] = part.block
            tables.frozen = None
            pool.release([block])

    # -- losing and keeping --------------------------------------------------------------------------------------------

    def _evict(self, part: CachedBlock) -> None:
        """A device block is handed out again: what it held moves to the host, if there is a host pool."""
        block, part.block = part.block, None
        if part.host_block is None and self._host_pools and self._host_pools[part.group].num_free_blocks:
            assert block is not None
            host = self._host_pools[part.group]
            part.host_block = host.allocate(1)[0]
            host.contents[part.host_block] = part
            self._copies.append(BlockCopy(part.group, block, part.host_block, CopyKind.TO_HOST))
        if part.host_block is None:
            self._index.remove(part)
        else:
            self._touch_host(part)

    def _touch_host(self, part: CachedBlock) -> None:
        """Make a host block the most recently used."""
        host = self._host_pools[part.group]
        assert part.host_block is not None
        if host.is_free(part.host_block):
            host.take(part.host_block)
        host.release([part.host_block])

    def _evict_from_host(self, part: CachedBlock) -> None:
        part.host_block = None
        if part.block is None:
            self._index.remove(part)

    def spill_cached(self) -> None:
        """Copy all cached blocks that nobody refers to to the host, as if their places were needed."""
        for pool in self.pools if self._host_pools else ():
            for block in pool.cached_blocks():
                part = pool.contents[block]
                assert part is not None
                pool.forget(block)
                self._evict(part)

    def cached_nodes(self) -> Iterator[PrefixNode]:
        """All blocks of tokens in the index, parents before children."""
        return self._index.nodes()

    def add_node(self, parent: PrefixNode | None, salt: str | None, token_ids: tuple[int, ...]) -> PrefixNode:
        """Enter a block of tokens into the index; nothing of it is cached yet."""
        return self._index.child(parent, salt, token_ids)

    def add_to_host(self, node: PrefixNode, key: PartKey) -> int | None:
        """A free host block for a part that is not cached yet; None if there is none or the part is cached."""
        host = self._host_pools[key[0]]
        if key in node.parts or not host.has_blank_block:
            return None
        part = node.parts[key] = CachedBlock(node, key)
        (part.host_block,) = host.allocate(1)
        host.contents[part.host_block] = part
        host.release([part.host_block])
        return part.host_block

    def finish_loading(self) -> None:
        """Put host blocks that were added into order, the end of a sequence before its beginning, as release does."""
        for node in reversed(list(self._index.nodes())):
            for part in node.parts.values():
                if part.host_block is not None:
                    self._touch_host(part)
            self._index.prune(node)

    @property
    def has_copies(self) -> bool:
        """Whether the next step must make copies first."""
        return bool(self._copies)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies between device and host that the next step must make first, in this order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def reset(self) -> None:
        """Forget all cached rows. Running requests keep their blocks, which others do not find any more."""
        self._index.clear()
        for pool in (*self.pools, *self._host_pools):
            for block, part in enumerate(pool.contents):
                if part is not None:
                    pool.forget(block)
        for tables in self._tables.values():
            tables.is_published = False
        self._copies.clear()

    def check_integrity(self) -> None:
        """Prove the books: every block is free or held by exactly the requests that list it, and every cached part is
        where the index says."""
        check_integrity(self.pools, self._host_pools, list(self._tables.values()), self._index)
