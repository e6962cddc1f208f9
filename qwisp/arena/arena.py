"""The pool of expert slots that a model's layers compute from, and the reads that fill it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from qwisp.arena.fences import Fences, SlotUse
from qwisp.arena.layer import LayerArena
from qwisp.arena.passes import PassPlan, plan_passes
from qwisp.arena.reader import Reader
from qwisp.arena.source import ExpertLayer
from qwisp.arena.stats import ArenaStats, LayerCounters
from qwisp.arena.trace import StepKind, TraceWriter
from qwisp.errors import ConfigError, InvariantError


@dataclass(frozen=True, slots=True)
class ExpertPass:
    """Experts that are in slots now, and the (row, k) pairs to compute with them."""

    experts: tuple[int, ...]
    """Ascending."""
    slots: tuple[int, ...]
    """The slot of each of `experts`."""
    pair_idx: npt.NDArray[np.int32]
    """[num_pairs], ascending: `row * top_k + k` of each pair of this pass."""
    pair_slots: npt.NDArray[np.int32]
    """[num_pairs]: the slot of each pair's expert."""


class LayerStep:
    """The passes of one layer step. Iterate once; hand in a fence for each pass before the next.

    Each pair is in exactly one pass (S1). Getting a pass reads what it misses, after waiting for
    the fences of everything that could still read the slots it overwrites (A3). A step may be
    abandoned at any point; it ends when the next one of its layer begins.
    """

    def __init__(
        self,
        arena: "ExpertArena",
        layer: LayerArena,
        plan: tuple[PassPlan, ...],
        expert_of_pair: npt.NDArray[np.int32],
    ) -> None:
        self.num_passes = len(plan)
        self._arena = arena
        self._layer = layer
        self._plan = plan
        self._expert_of_pair = expert_of_pair
        self._num_done = 0
        self._use: SlotUse | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ExpertPass:
        """Brings the next pass's experts into slots.

        Raises:
            ExpertReadError: an expert could not be read. The step is over; the arena stays usable.
            InvariantError: the last pass has no fence (A3), or the step is over (A4).
        """
        if self._use is not None and self._use.output is None:
            raise InvariantError("A3: the next pass is asked for before fence() of the last one")
        if self._num_done == self.num_passes:
            raise StopIteration
        plan = self._plan[self._num_done]
        self._arena._bring(self, self._layer, plan)
        self._num_done += 1
        slots = self._layer.table.slots_of(plan.experts)
        self._use = self._arena._fences.hold(self._layer.source.layer, plan.experts, slots)
        pair_idx = self._pairs_of(plan)
        pair_slots = self._layer.table.slots_of_pairs(self._expert_of_pair[pair_idx])
        return ExpertPass(plan.experts, slots, pair_idx, pair_slots)

    def fence(self, output: mx.array) -> None:
        """Hands in the result of the computation that reads the slots of the last pass.

        `output` need not be evaluated. The slots are not overwritten before it is (A3).

        Raises:
            InvariantError: no pass waits for its fence.
        """
        if self._use is None or self._use.output is not None:
            raise InvariantError("A3: fence() without a pass that waits for one")
        self._use.output = output

    def _pairs_of(self, plan: PassPlan) -> npt.NDArray[np.int32]:
        if self.num_passes == 1:
            return np.arange(self._expert_of_pair.size, dtype=np.int32)
        is_in_pass = np.zeros(self._layer.source.num_experts, dtype=np.bool_)
        is_in_pass[list(plan.experts)] = True
        return is_in_pass[self._expert_of_pair].nonzero()[0].astype(np.int32)


class ExpertArena:
    """C slots for the experts of each layer. Belongs to one thread, which also runs MLX.

    Invariants: A1, A2 and A5 are kept by each layer's `SlotTable`, A3 by `Fences`, A4 by
    `plan_passes` and `LayerArena`. Each is asserted where it could break; `check()` verifies all.

    The arena owns its reader and trace: `close()` closes them.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        capacity: int,
        reader: Reader,
        *,
        trace: TraceWriter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocates the slots of all layers. Reads nothing.

        Args:
            layers: The layers with routed experts, all with the same number of experts.
            capacity: Slots per layer (C).
            reader: Moves the bytes.
            trace: Records the routes of every layer step.
            clock: Seconds, for `read_wait_s` and `compute_wait_s`.

        Raises:
            ConfigError: capacity is not in [1, num_experts], or the layers do not fit together.
        """
        self.num_experts = _common_num_experts(layers)
        if not 1 <= capacity <= self.num_experts:
            raise ConfigError(
                f"capacity={capacity} is not in 1..{self.num_experts}: a layer has "
                f"{self.num_experts} experts; set capacity to at most that"
            )
        self.capacity = capacity
        self._reader = reader
        self._trace = trace
        self._clock = clock
        self._fences = Fences()
        self._layers = {
            source.layer: LayerArena(source, capacity, reader, self._fences) for source in layers
        }
        self._open_steps: dict[int, LayerStep] = {}
        self._read_wait_s = 0.0
        self._compute_wait_s = 0.0

    @property
    def is_resident(self) -> bool:
        """Whether every expert has a slot, which is then the one of its own id."""
        return self.capacity == self.num_experts

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of all layers."""
        return sum(layer.bank.nbytes for layer in self._layers.values())

    def bank(self, layer: int) -> Mapping[str, mx.array]:
        """Part name -> `[capacity, *part.shape]`. The same arrays for the arena's life."""
        return self._layers[layer].bank.arrays

    def resident(self, layer: int) -> dict[int, int]:
        """Expert -> slot, of the layer's experts that are in slots now, by ascending expert."""
        table = self._layers[layer].table
        experts = sorted(table.resident)
        return dict(zip(experts, table.slots_of(experts), strict=True))

    def preload(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Reads every expert that is not resident yet; for resident arenas. Open steps end.

        Args:
            on_progress: Called with (bytes of experts in slots, bytes of all) after each layer.

        Raises:
            ConfigError: the arena has fewer slots than experts.
            ExpertReadError: an expert could not be read; calling again reads only what is absent.
        """
        if not self.is_resident:
            raise ConfigError(
                f"capacity={self.capacity} of {self.num_experts} experts cannot be preloaded"
            )
        total = self.nbytes
        done = 0
        for layer in self._layers.values():
            self._end_earlier_step(layer)
            layer.start_preload()
            self._wait_for_reads(layer)
            done += layer.bank.nbytes
            if on_progress is not None:
                on_progress(done, total)

    def begin(self, layer: int, routes: npt.NDArray[Any], *, kind: StepKind) -> LayerStep:
        """Plans one layer step, after waiting for all fences of earlier ones.

        An unfinished earlier step of the layer ends. Reads nothing yet.

        Args:
            layer: Which layer.
            routes: [rows, top_k] integers, the expert of each (row, k) pair.
            kind: What the step is part of; for the trace only.

        Raises:
            InvariantError: a route is no expert of the layer (S1).
        """
        state = self._layers[layer]
        self._wait_for_fences()
        self._end_earlier_step(state)
        expert_of_pair, union = self._union(routes)
        if self._trace is not None:
            self._trace.record(layer, kind, routes)
        resident = state.table.resident
        plan = plan_passes(union, resident, self.capacity)
        num_misses = sum(len(each.reads) for each in plan)
        state.counters.count_step(
            num_hits=len(union) - num_misses, num_misses=num_misses, num_passes=len(plan)
        )
        step = self._open_steps[layer] = LayerStep(self, state, plan, expert_of_pair)
        return step

    def observe(self, layer: int, routes: npt.NDArray[Any], *, kind: StepKind) -> None:
        """Counts and records a layer step computed from a resident arena without `begin()`.

        Raises:
            InvariantError: not every expert of the layer is in its slot (A5), or a route is no
                expert of the layer (S1).
        """
        state = self._layers[layer]
        if len(state.table.resident) < self.num_experts:
            raise InvariantError(
                f"A5: layer {layer} was computed without begin() with "
                f"{len(state.table.resident)} of {self.num_experts} experts resident"
            )
        _, union = self._union(routes)
        if self._trace is not None:
            self._trace.record(layer, kind, routes)
        num_passes = 1 if union else 0
        state.counters.count_step(num_hits=len(union), num_misses=0, num_passes=num_passes)
        state.counters.passes += num_passes

    def stats(self) -> ArenaStats:
        """Counters so far."""
        counters = [state.counters for state in self._layers.values()]

        def total(name: str) -> int:
            return sum(getattr(each, name) for each in counters)

        totals = {name: total(name) for name in LayerCounters.__slots__}
        return ArenaStats(
            **totals,
            read_wait_s=self._read_wait_s,
            compute_wait_s=self._compute_wait_s,
            layers=tuple(s.counters.snapshot(layer) for layer, s in self._layers.items()),
        )

    def check(self) -> None:
        """Verifies A1-A5 over all layers, in time that grows with the slots.

        Raises:
            InvariantError: one does not hold; the message starts with its id.
        """
        for state in self._layers.values():
            state.check()

    def close(self) -> None:
        """Waits for reads in flight, then closes reader and trace. May be called again."""
        self._reader.close()
        if self._trace is not None:
            self._trace.close()

    def _bring(self, step: LayerStep, layer: LayerArena, plan: PassPlan) -> None:
        """Has the experts of a pass in slots when it returns."""
        if self._open_steps.get(layer.source.layer) is not step:
            raise InvariantError(
                f"A4: this step of layer {layer.source.layer} is over: a read failed or another "
                f"step began"
            )
        if plan.reads:
            self._wait_for_fences()
        layer.start_pass(plan)
        if plan.reads:
            self._wait_for_reads(layer)

    def _end_earlier_step(self, layer: LayerArena) -> None:
        self._open_steps.pop(layer.source.layer, None)
        self._fences.abandon(layer.source.layer)
        # Reads are in flight here only after an interrupt; what failed of them nobody needs now.
        layer.settle()

    def _wait_for_reads(self, layer: LayerArena) -> None:
        began = self._clock()
        try:
            failure = layer.settle()
        finally:
            self._read_wait_s += self._clock() - began
        if failure is not None:
            self._open_steps.pop(layer.source.layer, None)
            raise failure

    def _wait_for_fences(self) -> None:
        began = self._clock()
        try:
            self._fences.wait()
        finally:
            self._compute_wait_s += self._clock() - began

    def _union(self, routes: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], list[int]]:
        """The expert of each pair, and the experts that occur, ascending."""
        expert_of_pair = routes.reshape(-1).astype(np.int32)
        is_routed = np.zeros(self.num_experts, dtype=np.bool_)
        try:
            # Unsigned, a negative id is too large instead of counting from the end.
            is_routed[expert_of_pair.view(np.uint32)] = True
        except IndexError:
            raise InvariantError(
                f"S1: routes {routes.min()}..{routes.max()} of {self.num_experts} experts"
            ) from None
        return expert_of_pair, is_routed.nonzero()[0].tolist()


def _common_num_experts(layers: Sequence[ExpertLayer]) -> int:
    counts = {source.layer: source.num_experts for source in layers}
    if not counts or len(counts) != len(layers):
        raise ConfigError(f"an arena needs layers, each once; got {[s.layer for s in layers]}")
    if len(set(counts.values())) > 1:
        raise ConfigError(f"layers differ in their number of experts: {counts}")
    return next(iter(counts.values()))
