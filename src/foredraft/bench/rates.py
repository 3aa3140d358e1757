"""How often drafts are accepted, as publications give it and as `synthetic_acceptance` takes it."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.errors import ConfigError


def conditional_rates(cumulative: Sequence[float]) -> tuple[float, ...]:
    """By depth: the share of drafts accepted among those whose predecessor was, from the share accepted among all.

    cumulative: by depth from 1 on, from 0 to 1, none larger than the one before; after a 0 the rates are 0.
    Raises ConfigError for anything else.
    """
    before = (1.0, *cumulative)
    if not all(0 <= rate <= above for rate, above in zip(cumulative, before)):
        raise ConfigError(f"cumulative rates must fall from depth to depth, from 1 to 0, not {list(cumulative)}")
    return tuple(rate / above if above else 0.0 for rate, above in zip(cumulative, before))
