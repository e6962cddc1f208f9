"""Which resident experts give up their slots. Pure: no clock, no hash order, no randomness."""

from collections.abc import Mapping, Set

from qwisp.errors import InvariantError


def least_recently_used(
    last_used: Mapping[int, int], pinned: Set[int], count: int
) -> tuple[int, ...]:
    """The `count` experts to evict: lowest tick first, then lowest expert id.

    A layer's tick counts its passes. An expert's tick is that of the last pass which computed it,
    or was to compute it and failed.

    Args:
        last_used: Tick of every resident expert.
        pinned: Experts that must stay.
        count: How many to evict.

    Raises:
        InvariantError: fewer than `count` experts may be evicted (A2).
    """
    candidates = sorted(
        (tick, expert) for expert, tick in last_used.items() if expert not in pinned
    )
    if len(candidates) < count:
        raise InvariantError(
            f"A2: {count} slots are needed but only {len(candidates)} experts may be evicted"
        )
    return tuple(expert for _, expert in candidates[:count])
