"""One layer of the arena: its slots, their memory, and the reads that fill them."""

from collections.abc import Sequence
from pathlib import Path

from qwisp.arena.bank import SlotBank
from qwisp.arena.eviction import least_recently_used
from qwisp.arena.fences import Fences
from qwisp.arena.passes import PassPlan
from qwisp.arena.reader import PendingRead, Reader
from qwisp.arena.requests import ReadRequest
from qwisp.arena.slots import SlotTable
from qwisp.arena.source import ExpertLayer
from qwisp.arena.stats import LayerCounters
from qwisp.errors import ExpertReadError, InvariantError


class LayerArena:
    """Brings experts of one layer into slots.

    Reads are started by `start_pass()` or `start_preload()` and end in `settle()`, which alone maps
    experts to slots. Until then their slots are `reading` and nothing else takes them.

    Invariant A4, of each step: a missing expert is demanded exactly once and a resident one never.
    """

    def __init__(self, source: ExpertLayer, capacity: int, reader: Reader, fences: Fences) -> None:
        self.source = source
        self.table = SlotTable(source.num_experts, capacity)
        self.bank = SlotBank(source, capacity)
        self.counters = LayerCounters()
        self._reader = reader
        self._fences = fences
        self._pending: dict[int, list[PendingRead]] = {}
        self._tick = 0
        self._num_demanded = 0

    def start_pass(self, plan: PassPlan) -> None:
        """Makes room for a pass and starts its reads. A pass is one tick of this layer's clock."""
        self._tick += 1
        reads = set(plan.reads)
        kept = [expert for expert in plan.experts if expert not in reads]
        self.table.touch(kept, self._tick)
        self.counters.passes += 1
        if plan.reads:
            self._make_room(len(reads), kept)
            self._count_demand(len(reads))
            self._start_reads(plan.reads)

    def start_preload(self) -> None:
        """Starts the reads of every expert that is not resident, before any step asks for them."""
        absent = [e for e in range(self.source.num_experts) if e not in self.table.resident]
        self.counters.bytes_speculative += len(absent) * self.source.expert_nbytes
        self._start_reads(absent)

    def settle(self) -> ExpertReadError | None:
        """Waits for all reads, maps the experts that arrived whole, empties the other slots (A5).

        Returns:
            The failure of the lowest expert that did not arrive; None when all did.
        """
        first_failure: ExpertReadError | None = None
        # An expert leaves `_pending` only after no thread touches its slot, so that an interrupt
        # here leaves the rest to the next call.
        for expert in sorted(self._pending):
            failure = self._wait_for(expert)
            del self._pending[expert]
            if failure is None:
                self.table.finish_read(expert, self._tick)
            else:
                self.table.fail_read(expert)
                first_failure = first_failure or failure
        return first_failure

    def check(self) -> None:
        """Verifies A1-A5 as far as this layer's own state shows them.

        Raises:
            InvariantError: one does not hold; the message starts with its id.
        """
        self.table.check()
        if self.table.is_settled != (not self._pending):
            raise InvariantError("A5: a slot waits for bytes that nobody reads")
        for use in self._fences:
            if use.layer != self.source.layer:
                continue
            held = tuple(self.table.expert_in(slot) for slot in use.slots)
            if held != use.experts:
                raise InvariantError(
                    f"A3: slots {use.slots} hold experts {held}, but a computation that may be "
                    f"unfinished reads {use.experts} there"
                )
        payload = self._num_demanded * self.source.expert_nbytes
        if self.counters.bytes_read != payload:
            raise InvariantError(
                f"A4: bytes_read={self.counters.bytes_read}, but {self._num_demanded} demanded "
                f"experts are {payload} bytes"
            )
        if self._num_demanded > self.counters.expert_misses:
            raise InvariantError(
                f"A4: {self.counters.expert_misses} misses, but {self._num_demanded} demanded"
            )

    def _make_room(self, num_reads: int, kept: Sequence[int]) -> None:
        num_short = num_reads - self.table.num_empty
        if num_short > 0:
            for victim in least_recently_used(self.table.last_used, set(kept), num_short):
                self.table.evict(victim)

    def _count_demand(self, num_experts: int) -> None:
        self._num_demanded += num_experts
        self.counters.bytes_read += num_experts * self.source.expert_nbytes
        self.counters.reads += num_experts * len(self.source.parts)

    def _start_reads(self, experts: Sequence[int]) -> None:
        for expert in experts:
            slot = self.table.start_read(expert)
            pending = self._pending[expert] = []
            self._fences.assert_free(self.source.layer, (slot,))
            for request in self._requests(expert, slot):
                pending.append(self._reader.submit(request))

    def _requests(self, expert: int, slot: int) -> list[ReadRequest]:
        return [
            ReadRequest(part.path, part.offset + expert * part.nbytes, (buffer,))
            for part, buffer in zip(self.source.parts, self.bank.buffers(slot), strict=True)
        ]

    def _wait_for(self, expert: int) -> ExpertReadError | None:
        outcomes = [read.result() for read in self._pending[expert]]
        self.counters.bytes_transferred += sum(each.bytes_transferred for each in outcomes)
        if len(outcomes) != len(self.source.parts):
            part = self.source.parts[len(outcomes)]
            return self._error(expert, part.path, part.offset, "the read was never started")
        for part, outcome in zip(self.source.parts, outcomes, strict=True):
            if outcome.failure is not None:
                error = self._error(
                    expert, part.path, outcome.failure.offset, str(outcome.failure.cause)
                )
                error.__cause__ = outcome.failure.cause
                return error
        return None

    def _error(self, expert: int, path: Path, offset: int, reason: str) -> ExpertReadError:
        return ExpertReadError(
            layer=self.source.layer, expert=expert, path=path, offset=offset, reason=reason
        )
