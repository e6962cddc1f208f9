"""Which expert is in which slot of one layer. Knows numbers only, no bytes and no weights."""

from bisect import bisect_left, insort
from collections.abc import KeysView, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from qwisp.errors import InvariantError

SlotState = Literal["empty", "reading", "ready"]

_NO_SLOT = -1


class SlotTable:
    """The slots of one layer, and which expert has which.

    A slot is `empty`, then `reading` for one expert, then `ready` with it, then `empty` again; a
    failed read goes from `reading` to `empty`. Only a `ready` slot can be looked up by its expert.
    With as many slots as experts, every expert has the slot of its own id; otherwise it gets the
    lowest empty one.

    Invariants, of which each change asserts its part in constant time and `check()` the whole:

    - A1: an expert occupies at most one slot; a slot holds at most one expert.
    - A2: empty slots and used slots are disjoint and add up to the capacity.
    - A5: an expert is looked up only where its bytes have arrived.
    """

    def __init__(self, num_experts: int, capacity: int) -> None:
        self.capacity = capacity
        self._is_identity = capacity == num_experts
        self._empty = list(range(capacity))
        self._expert_in: list[int | None] = [None] * capacity
        self._reading: dict[int, int] = {}
        self._last_used: dict[int, int] = {}
        self._slot_of = np.full(num_experts, _NO_SLOT, dtype=np.int32)

    @property
    def resident(self) -> KeysView[int]:
        """The experts whose bytes are in a slot. A live view, in no useful order."""
        return self._last_used.keys()

    @property
    def last_used(self) -> Mapping[int, int]:
        """Tick of each resident expert. A live view."""
        return MappingProxyType(self._last_used)

    @property
    def num_empty(self) -> int:
        """Slots that hold nothing and wait for nothing."""
        return len(self._empty)

    @property
    def is_settled(self) -> bool:
        """Whether no slot waits for bytes."""
        return not self._reading

    def state(self, slot: int) -> SlotState:
        """What the slot is doing."""
        expert = self._expert_in[slot]
        if expert is None:
            return "empty"
        return "reading" if expert in self._reading else "ready"

    def expert_in(self, slot: int) -> int | None:
        """The expert that a slot holds or waits for."""
        return self._expert_in[slot]

    def slots_of(self, experts: Sequence[int]) -> tuple[int, ...]:
        """The slots of resident experts.

        Raises:
            InvariantError: one of them is not resident (A5).
        """
        slots = tuple(self._slot_of[list(experts)].tolist())
        if _NO_SLOT in slots:
            absent = experts[slots.index(_NO_SLOT)]
            raise InvariantError(f"A5: expert {absent} is looked up but its bytes are in no slot")
        return slots

    def slots_of_pairs(self, experts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The slot of each expert of an array, all of which must be resident."""
        return self._slot_of[experts]

    def touch(self, experts: Sequence[int], tick: int) -> None:
        """Notes that resident experts are used at `tick`."""
        for expert in experts:
            if expert not in self._last_used:
                raise InvariantError(f"A5: expert {expert} is used but its bytes are in no slot")
            self._last_used[expert] = tick

    def evict(self, expert: int) -> int:
        """Empties the slot of a resident expert and returns the slot."""
        if self._last_used.pop(expert, None) is None:
            raise InvariantError(f"A2: expert {expert} is evicted but not resident")
        slot = int(self._slot_of[expert])
        self._slot_of[expert] = _NO_SLOT
        self._empty_slot(slot, expert)
        return slot

    def start_read(self, expert: int) -> int:
        """Takes an empty slot for an expert's bytes and returns the slot."""
        if expert in self._last_used or expert in self._reading:
            raise InvariantError(f"A1: expert {expert} has a slot already")
        if not self._empty:
            raise InvariantError(f"A2: no slot is empty for expert {expert}")
        slot = self._take_empty(expert)
        if self._expert_in[slot] is not None:
            raise InvariantError(f"A1: slot {slot} holds expert {self._expert_in[slot]}")
        self._expert_in[slot] = expert
        self._reading[expert] = slot
        return slot

    def finish_read(self, expert: int, tick: int) -> None:
        """Maps an expert, all of whose bytes have arrived, to its slot."""
        slot = self._end_read(expert)
        self._slot_of[expert] = slot
        self._last_used[expert] = tick

    def fail_read(self, expert: int) -> None:
        """Empties the slot of an expert whose bytes have not all arrived (A5)."""
        self._empty_slot(self._end_read(expert), expert)

    def check(self) -> None:
        """Verifies A1, A2 and A5 over all slots.

        Raises:
            InvariantError: one does not hold; the message starts with its id.
        """
        mapped = {expert: int(self._slot_of[expert]) for expert in self._last_used}
        if int((self._slot_of != _NO_SLOT).sum()) != len(mapped):
            raise InvariantError("A5: an expert that is not resident is mapped to a slot")
        owners = list(mapped.items()) + list(self._reading.items())
        if len(owners) != len(set(slot for _, slot in owners)):
            raise InvariantError(f"A1: two experts share a slot: {sorted(owners)}")
        if len(owners) != len(set(expert for expert, _ in owners)):
            raise InvariantError(f"A1: an expert has two slots: {sorted(owners)}")
        for expert, slot in owners:
            if self._expert_in[slot] != expert:
                raise InvariantError(
                    f"A1: expert {expert} claims slot {slot}, which holds {self._expert_in[slot]}"
                )
        used = {slot for _, slot in owners}
        if sorted(self._empty) != sorted(set(range(self.capacity)) - used):
            raise InvariantError(
                f"A2: empty slots {self._empty} and used slots {sorted(used)} are not all of "
                f"{self.capacity}, each once"
            )
        if any(self._expert_in[slot] is not None for slot in self._empty):
            raise InvariantError("A2: an empty slot holds an expert")

    def _take_empty(self, expert: int) -> int:
        if not self._is_identity:
            return self._empty.pop(0)
        position = bisect_left(self._empty, expert)
        if self._empty[position : position + 1] != [expert]:
            raise InvariantError(f"A2: slot {expert} of expert {expert} is not empty")
        return self._empty.pop(position)

    def _end_read(self, expert: int) -> int:
        slot = self._reading.pop(expert, None)
        if slot is None:
            raise InvariantError(f"A5: expert {expert} arrived but was not being read")
        return slot

    def _empty_slot(self, slot: int, expert: int) -> None:
        if self._expert_in[slot] != expert:
            raise InvariantError(
                f"A1: slot {slot} holds {self._expert_in[slot]}, not expert {expert}"
            )
        self._expert_in[slot] = None
        insort(self._empty, slot)
