"""Which experts of a layer step are computed together, and what is read before. Pure."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from qwisp.errors import ConfigError, InvariantError


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One pass of a layer step. Both tuples ascend."""

    experts: tuple[int, ...]
    """Experts computed in this pass; all are in slots while it runs."""
    reads: tuple[int, ...]
    """Those of them that are read into slots before it."""


def plan_passes(union: Sequence[int], resident: Set[int], capacity: int) -> tuple[PassPlan, ...]:
    """Splits the experts of one layer step into passes of at most `capacity` experts.

    Pass 1 takes every resident expert of the union and the lowest missing ones that fit beside
    them; the others follow in waves of at most `capacity`. An empty union needs no pass.

    Both costs are as low as any plan's can be, with `U` the union and `C` the capacity:

    - Reads (A4): a missing expert must be read at least once, and a resident one need not be. Here
      each missing expert is read exactly once, because it is computed in the pass it is read for,
      and no resident expert is, because all are computed in pass 1, before one can be evicted.
    - Passes: a pass computes from `C` slots, so at most `C` experts, and any plan has at least
      `ceil(|U| / C)` passes. Pass 1 takes `min(|U|, C)` experts and every wave but the last takes
      `C`, so this plan has exactly `ceil(|U| / C)`.

    Args:
        union: The routed experts, each once, in any order.
        resident: Experts of the layer that are in slots now; at most `capacity` of them.
        capacity: Slots of the layer (C).

    Raises:
        ConfigError: capacity is below 1.
        InvariantError: more experts are resident than there are slots (A2).
    """
    if capacity < 1:
        raise ConfigError(f"capacity={capacity} is below 1: a pass needs at least one slot")
    if len(resident) > capacity:
        raise InvariantError(f"A2: {len(resident)} resident experts in {capacity} slots")
    experts = sorted(union)
    missing = [expert for expert in experts if expert not in resident]
    if len(experts) <= capacity:
        return (PassPlan(tuple(experts), tuple(missing)),) if experts else ()
    num_beside = capacity - (len(experts) - len(missing))
    held_back = set(missing[num_beside:])
    first = tuple(expert for expert in experts if expert not in held_back)
    waves = [
        tuple(missing[start : start + capacity])
        for start in range(num_beside, len(missing), capacity)
    ]
    return (
        PassPlan(first, tuple(missing[:num_beside])),
        *(PassPlan(wave, wave) for wave in waves),
    )
