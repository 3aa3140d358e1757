"""The tree of cached blocks, and how much of a sequence is found in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cache_layouts import make_layout
from hypothesis import given
from hypothesis import strategies as st

from foredraft.cache.groups import CacheLayout
from foredraft.cache.prefix_index import CachedBlock, PartKey, PrefixIndex, PrefixNode
from foredraft.cache.prefix_match import PrefixMatch, match_prefix

SIZE = 2
SALTS = (None, "", "x")


class SameHash(int):
    """Token ids that all fall into one bucket of any table."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 0


def enter(index: PrefixIndex, salt: str | None, token_ids: Sequence[int]) -> list[PrefixNode]:
    """The nodes of a sequence's full blocks, made where they are not there."""
    nodes: list[PrefixNode] = []
    for start in range(0, len(token_ids) - SIZE + 1, SIZE):
        nodes.append(index.child(nodes[-1] if nodes else None, salt, tuple(token_ids[start : start + SIZE])))
    return nodes


def add_part(node: PrefixNode, key: PartKey = (0, ())) -> CachedBlock:
    part = node.parts[key] = CachedBlock(node, key)
    return part


# -- the tree --------------------------------------------------------------------------------------------------------


@given(
    entered=st.lists(st.tuples(st.sampled_from(SALTS), st.lists(st.integers(0, 1), max_size=9)), max_size=6),
    salt=st.sampled_from(SALTS),
    token_ids=st.lists(st.integers(0, 1), max_size=9),
    is_colliding=st.booleans(),
)
def test_a_sequence_finds_the_blocks_that_it_has_in_common_with_one_of_the_same_salt(
    entered: list[tuple[str | None, list[int]]], salt: str | None, token_ids: list[int], is_colliding: bool
) -> None:
    kind = SameHash if is_colliding else int
    index = PrefixIndex(SIZE)
    for other_salt, other in entered:
        enter(index, other_salt, list(map(kind, other)))
    found = index.walk(salt, list(map(kind, token_ids)))
    prefixes = {tuple(other[:end]) for s, other in entered if s == salt for end in range(SIZE, len(other) + 1, SIZE)}
    num_expected = 0
    while (num_expected + 1) * SIZE <= len(token_ids) and tuple(token_ids[: (num_expected + 1) * SIZE]) in prefixes:
        num_expected += 1
    assert len(found) == num_expected
    parent: PrefixNode | None = None
    for number, node in enumerate(found):
        assert node.salt == salt
        assert node.token_ids == tuple(token_ids[number * SIZE : (number + 1) * SIZE])
        assert parent is None or node.parent is parent
        parent = node


def test_equal_hashes_do_not_mix_up_two_prefixes() -> None:
    index = PrefixIndex(SIZE)
    first, second = (enter(index, None, [SameHash(token), SameHash(0), SameHash(1)] * 2) for token in (3, 4))
    assert hash(first[0].token_ids) == hash(second[0].token_ids)
    assert index.walk(None, [SameHash(3), SameHash(0), SameHash(1)] * 2) == first
    assert index.walk(None, [SameHash(4), SameHash(0), SameHash(1)] * 2) == second
    assert index.walk(None, [SameHash(5), SameHash(0), SameHash(1)] * 2) == []


def test_parents_are_listed_before_their_children() -> None:
    index = PrefixIndex(SIZE)
    for salt in SALTS:
        for number in range(8):
            enter(index, salt, [number % 2, 0, number % 4, 1, number, 2])
    seen: set[PrefixNode] = set()
    for node in index.nodes():
        assert node.parent is not None
        assert node.parent in seen or not node.parent.token_ids
        seen.add(node)
    assert len(seen) == len(SALTS) * (2 + 4 + 8)


def test_a_node_goes_with_its_last_part_and_takes_empty_ones_above_it_along() -> None:
    index = PrefixIndex(SIZE)
    a, b, c = enter(index, "x", [1, 1, 2, 2, 3, 3])
    parts = [add_part(node) for node in (a, c)]
    index.remove(parts[0])
    assert index.walk("x", [1, 1, 2, 2, 3, 3]) == [a, b, c], "a block in the middle may be missing"
    index.remove(parts[1])
    assert list(index.nodes()) == []
    assert index.walk("x", [1, 1]) == []
    assert index._roots == {}, "a salt that is not used any more takes memory"


def test_a_node_stays_as_long_as_a_request_ends_in_it() -> None:
    index = PrefixIndex(SIZE)
    first, second = enter(index, None, [1, 1, 2, 2])
    part = add_part(second)
    second.num_users = 1
    index.remove(part)
    assert index.walk(None, [1, 1, 2, 2]) == [first, second]
    second.num_users = 0
    index.prune(second)
    assert index._roots == {}


def test_what_was_in_the_tree_before_it_was_cleared_does_not_touch_the_new_one() -> None:
    index = PrefixIndex(SIZE)
    (old,) = enter(index, None, [1, 1])
    old.num_users = 1
    index.clear()
    (new,) = enter(index, None, [1, 1])
    add_part(new)
    old.num_users = 0
    index.prune(old)
    assert index.walk(None, [1, 1]) == [new]


# -- how much is found -----------------------------------------------------------------------------------------------

windows = st.sampled_from((None, 1, 2, 3, 4, 6))


@st.composite
def partly_cached(draw: st.DrawFn) -> tuple[CacheLayout, int, list[int], list[PrefixNode], int]:
    """A layout, a block size, a sequence, the nodes of its leading blocks with any parts, and a depth to look for."""
    modules = draw(st.lists(windows, max_size=3))
    layout = make_layout(draw(st.lists(windows, min_size=1, max_size=2)), modules)
    size = draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, 1), min_size=size, max_size=7 * size))
    index = PrefixIndex(size)
    nodes: list[PrefixNode] = []
    for start in range(0, len(tokens) - size + 1, size):
        nodes.append(index.child(nodes[-1] if nodes else None, None, tuple(tokens[start : start + size])))
        for group in layout.target_groups:
            if draw(st.integers(0, 4)):
                add_part(nodes[-1], (group, ()))
        following = tokens[start + size : start + size + len(modules)]
        others = draw(st.lists(st.integers(0, 1), min_size=len(modules), max_size=len(modules)))
        for continuation in (following, others):
            length = draw(st.integers(0, len(continuation)))
            for group in layout.module_groups if length else ():
                if draw(st.integers(0, 4)):
                    add_part(nodes[-1], (group, tuple(continuation[:length])))
    return layout, size, tokens, nodes, draw(st.integers(0, len(modules)))


def num_found(layout: CacheLayout, size: int, groups: Sequence[int], is_cached: Sequence[set[int]]) -> int:
    """By the definition: the largest number of rows after which each group has all that the next row needs."""
    for count in range(len(is_cached), 0, -1):
        needed = {group: range(layout.groups[group].first_kept_row(count * size) // size, count) for group in groups}
        if all(group in is_cached[block] for group, blocks in needed.items() for block in blocks):
            return count * size
    return 0


def names(match: PrefixMatch, layout: CacheLayout) -> dict[int, dict[int, CachedBlock]]:
    return dict(zip((*layout.target_groups, *layout.module_groups), (*match.target_parts, *match.module_parts)))


@given(partly_cached())
def test_a_hit_is_the_longest_that_has_all_it_needs(
    case: tuple[CacheLayout, int, list[int], list[PrefixNode], int],
) -> None:
    layout, size, tokens, nodes, depth = case
    match = match_prefix(layout, size, nodes, tokens, depth)
    is_cached = [{group for group, continuation in node.parts if not continuation} for node in nodes]
    assert match.num_rows == num_found(layout, size, layout.target_groups, is_cached)
    assert list(match.nodes) == nodes[: match.num_rows // size]
    found = names(match, layout)
    for group in layout.target_groups:
        needed = range(layout.groups[group].first_kept_row(match.num_rows) // size, match.num_rows // size)
        assert found[group] == {block: nodes[block].parts[group, ()] for block in needed}


@given(partly_cached())
def test_module_rows_are_found_by_their_own_tokens_and_the_next(
    case: tuple[CacheLayout, int, list[int], list[PrefixNode], int],
) -> None:
    layout, size, tokens, nodes, depth = case
    match = match_prefix(layout, size, nodes, tokens, depth)
    assert match.num_module_rows % size == 0
    assert match.num_module_rows <= match.num_rows
    found = names(match, layout)
    if depth == 0:
        assert match.num_module_rows == match.module_depth == 0
    for group in layout.module_groups:
        first = layout.groups[group].first_kept_row(match.num_module_rows) // size
        assert found[group].keys() == set(range(first, match.num_module_rows // size))
        for block, part in found[group].items():
            _, continuation = part.key
            end = (block + 1) * size
            assert part.node is nodes[block]
            assert len(continuation) >= match.module_depth >= depth
            assert continuation == tuple(tokens[end : end + len(continuation)])


@given(partly_cached())
def test_no_longer_run_of_module_blocks_would_have_served(
    case: tuple[CacheLayout, int, list[int], list[PrefixNode], int],
) -> None:
    """Where there is one group of modules; with several, the first one decides which of its depths is looked at."""
    layout, size, tokens, nodes, depth = case
    if depth == 0 or len(layout.module_groups) > 1:
        return
    match = match_prefix(layout, size, nodes, tokens, depth)
    is_cached: list[set[int]] = []
    for block, node in enumerate(nodes[: match.num_rows // size]):
        end = (block + 1) * size
        if end + depth > len(tokens):
            break  # the last rows depend on tokens that are not known
        is_cached.append(
            {group for group, c in node.parts if len(c) >= depth and c == tuple(tokens[end : end + len(c)])}
        )
    assert match.num_module_rows == num_found(layout, size, layout.module_groups, is_cached)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_end_of_a_sequence_has_no_tokens_after_it_to_compare(depth: int) -> None:
    layout = make_layout([None], [None] * 3)
    tokens = [0, 1, 2, 3, 4, 5]
    nodes = enter(PrefixIndex(SIZE), None, tokens)
    for block, node in enumerate(nodes):
        add_part(node, (0, ()))
        add_part(node, (1, tuple(tokens[2 * block + 2 :][:3])))
    match = match_prefix(layout, SIZE, nodes, tokens, depth)
    assert match.num_rows == 6
    assert match.num_module_rows == (4 if depth <= 2 else 2)
