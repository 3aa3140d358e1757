"""The rule's short cut equals the rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foredraft.exactness import ExactRows


@given(st.data())
def test_a_cycle_is_a_verification_and_then_a_draft(data: st.DataObject) -> None:
    """Along a history of decode steps with any depths and accepted counts, some of them at depth 0."""
    num_modules = data.draw(st.integers(1, 5), "modules")
    num_tokens = data.draw(st.integers(1, 9), "prompt")
    exact = ExactRows.none(num_modules).after_rows(num_tokens, data.draw(st.integers(0, num_tokens), "rows"), 1)
    num_pending = 0
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        num_accepted = data.draw(st.integers(0, num_pending), "accepted")
        num_tokens += num_accepted + 1
        verified = exact.after_verify(num_accepted)
        depth = data.draw(st.integers(0, num_modules), "depth")
        if depth:
            expected = verified.window_start(depth), verified.after_draft(num_tokens, num_tokens - 1, depth)
            assert exact.after_cycle(num_accepted, num_tokens, num_tokens - 1, depth) == expected
            exact = expected[1]
        else:
            exact = verified
        num_pending = depth
