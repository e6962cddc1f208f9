"""What an LRU arena must have read for a recorded trace, worked out again in plain Python.

Written from the documentation, to check an arena's counters against (A4). The rules: a layer has
`capacity` slots. A layer step takes the resident experts of its union first, together with the
lowest missing ones that fit beside them, then the other missing ones in waves of `capacity`, all by
ascending id. Each of these groups is a tick of the layer. A missing expert takes an empty slot, or
that of the resident expert with the lowest (last tick, id) that the group does not need.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from qwisp.arena.trace import Trace


@dataclass
class LayerReplay:
    """One layer's totals."""

    expert_hits: int = 0
    expert_misses: int = 0
    bytes_read: int = 0
    layer_steps: int = 0
    split_layer_steps: int = 0
    passes: int = 0


def replay(trace: Trace, capacity: int, expert_nbytes: Mapping[int, int]) -> dict[int, LayerReplay]:
    """Totals per layer. `expert_nbytes`: bytes of one expert, by layer."""
    totals = {layer: LayerReplay() for layer in trace.header.layers}
    last_tick: dict[int, dict[int, int]] = {layer: {} for layer in trace.header.layers}
    for step in trace:
        union = sorted({int(expert) for row in step.routes for expert in row})
        slots, total = last_tick[step.layer], totals[step.layer]
        hits = [expert for expert in union if expert in slots]
        misses = [expert for expert in union if expert not in slots]
        order = hits + misses
        groups = [order[i : i + capacity] for i in range(0, len(order), capacity)]
        for group in groups:
            total.passes += 1
            _load(slots, set(group), capacity, tick=total.passes)
        total.expert_hits += len(hits)
        total.expert_misses += len(misses)
        total.bytes_read += len(misses) * expert_nbytes[step.layer]
        total.layer_steps += 1
        total.split_layer_steps += len(groups) > 1
    return totals


def _load(slots: dict[int, int], group: set[int], capacity: int, tick: int) -> None:
    while len(slots.keys() | group) > capacity:
        del slots[min((last, e) for e, last in slots.items() if e not in group)[1]]
    slots.update(dict.fromkeys(group, tick))
