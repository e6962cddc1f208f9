"""The arena against a dict, under faults, with steps that overlap and steps that are abandoned."""

from collections import Counter
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from qwisp.arena.arena import ExpertArena
from qwisp.errors import ConfigError, ExpertReadError, InvariantError
from tests.expert_files import ExpertFiles
from tests.sim_reader import SimReader

NUM_EXPERTS = 10
TOP_K = 2
LAYERS = (1, 3)

MUST_HAPPEN = {
    "eviction under pressure",
    "overflow",
    "three passes or more",
    "short",
    "reorder",
    "failure",
    "failure in a later wave",
    "recovered error",
    "others of a failed wave arrived",
    "step abandoned between passes",
    "step abandoned without fence",
    "step outlived by another layer's",
    "resident arena preloaded",
    "preload failed",
    "observed",
}

routes_of = st.lists(
    st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True),
    max_size=6,
)


class LayerModel:
    """One layer as a dict from expert to last tick."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.last_used = {}
        self.tick = 0
        self.counts = Counter()

    def plan(self, union):
        hits = sorted(union & self.last_used.keys())
        misses = sorted(union - self.last_used.keys())
        order, size = hits + misses, self.capacity
        passes = [sorted(order[i : i + size]) for i in range(0, len(order), size)]
        self.counts["expert_hits"] += len(hits)
        self.counts["expert_misses"] += len(misses)
        self.counts["layer_steps"] += 1
        self.counts["split_layer_steps"] += len(passes) > 1
        return passes

    def compute(self, experts, failed):
        """One pass; returns how many experts it evicted."""
        self.tick += 1
        self.counts["passes"] += 1
        missing = [e for e in experts if e not in self.last_used]
        self.counts["demanded"] += len(missing)
        num_evicted = 0
        while len(self.last_used) + len(missing) > self.capacity:
            unpinned = [(tick, e) for e, tick in self.last_used.items() if e not in experts]
            del self.last_used[min(unpinned)[1]]
            num_evicted += 1
        for expert in experts:
            if expert not in failed:
                self.last_used[expert] = self.tick
        return num_evicted


class OpenStep:
    """A layer step in progress and what must come of it."""

    def __init__(self, step, routes, passes):
        self.step = step
        self.flat = [expert for row in routes for expert in row]
        self.passes = passes
        self.num_done = 0
        self.needs_fence = False
        self.pairs_done = []


class ArenaMachine(RuleBasedStateMachine):
    files: ClassVar[ExpertFiles]
    seen: ClassVar[Counter]

    @initialize(
        seed=st.integers(0, 2**32),
        capacity=st.sampled_from([2, 2, 3, 4, 6, 9, NUM_EXPERTS, NUM_EXPERTS]),
        threads=st.sampled_from([0, 0, 0, 3]),
    )
    def make(self, seed, capacity, threads):
        self.reader = SimReader(seed, short=0.2, error=0.12, retries=1, threads=threads)
        self.arena = ExpertArena(self.files.layers, capacity, self.reader)
        self.models = {layer: LayerModel(capacity) for layer in LAYERS}
        self.open = {}
        self.outputs = []
        self.preloaded_bytes = 0

    @rule(layer=st.sampled_from(LAYERS), routes=routes_of)
    def begin(self, layer, routes):
        earlier = self.open.pop(layer, None)
        if earlier is not None and 0 < earlier.num_done < len(earlier.passes):
            self.seen["step abandoned between passes"] += 1
        if earlier is not None and earlier.needs_fence:
            self.seen["step abandoned without fence"] += 1
        if any(other.num_done for other in self.open.values()):
            self.seen["step outlived by another layer's"] += 1
        array = np.array(routes, dtype=np.uint32).reshape(-1, TOP_K)
        step = self.arena.begin(layer, array, kind="decode")
        passes = self.models[layer].plan({expert for row in routes for expert in row})
        assert step.num_passes == len(passes)
        self.seen["overflow"] += len(passes) > 1
        self.seen["three passes or more"] += len(passes) > 2
        self.open[layer] = OpenStep(step, routes, passes)

    @rule(layer=st.sampled_from(LAYERS), fence_now=st.sampled_from([True, True, True, False]))
    def advance(self, layer, fence_now):
        current = self.open.get(layer)
        if current is None:
            return
        if current.needs_fence:
            with pytest.raises(InvariantError, match=r"^A3"):
                next(current.step)
            current.step.fence(self.read_slots(layer, current.last_pass))
            current.needs_fence = False
        if current.num_done == len(current.passes):
            assert next(current.step, None) is None
            assert sorted(current.pairs_done) == list(range(len(current.flat)))
            del self.open[layer]
            return
        self.next_pass(layer, current)
        if fence_now and layer in self.open:
            current.step.fence(self.read_slots(layer, current.last_pass))
            current.needs_fence = False

    @rule(layer=st.sampled_from(LAYERS), routes=routes_of)
    def run_whole_step(self, layer, routes):
        self.begin(layer, routes)
        while layer in self.open:
            self.advance(layer, True)

    @rule()
    def preload(self):
        if not self.arena.is_resident:
            with pytest.raises(ConfigError):
                self.arena.preload()
            return
        wanted = {
            layer: set(range(NUM_EXPERTS)) - m.last_used.keys() for layer, m in self.models.items()
        }
        reached = list(LAYERS)
        try:
            self.arena.preload()
            self.seen["resident arena preloaded"] += 1
            failed = set()
        except ExpertReadError as error:
            self.seen["preload failed"] += 1
            failed = self.take_failed(error)
            # The failing layer is the last one that preload() came to.
            reached = reached[: reached.index(error.layer) + 1]
        for layer in reached:
            self.open.pop(layer, None)
            model = self.models[layer]
            self.preloaded_bytes += len(wanted[layer]) * self.files.expert_nbytes
            for expert in wanted[layer]:
                if (layer, expert) not in failed:
                    model.last_used[expert] = model.tick

    @rule(layer=st.sampled_from(LAYERS), routes=routes_of)
    def observe(self, layer, routes):
        array = np.array(routes, dtype=np.int64).reshape(-1, TOP_K)
        model = self.models[layer]
        if len(model.last_used) < NUM_EXPERTS:
            with pytest.raises(InvariantError, match=r"^A5"):
                self.arena.observe(layer, array, kind="prefill")
            return
        self.arena.observe(layer, array, kind="prefill")
        self.seen["observed"] += 1
        model.counts["passes"] += len(model.plan({expert for row in routes for expert in row}))

    def next_pass(self, layer, current):
        expected, model = current.passes[current.num_done], self.models[layer]
        missing = set(expected) - model.last_used.keys()
        try:
            found = next(current.step)
        except ExpertReadError as error:
            failed = {expert for _, expert in self.take_failed(error)}
            assert failed <= missing
            self.seen["failure in a later wave"] += current.num_done > 0
            self.seen["others of a failed wave arrived"] += failed != missing
            model.compute(expected, failed)
            del self.open[layer]
            with pytest.raises(InvariantError, match=r"^A4"):
                next(current.step)
            return
        assert not self.reader.take_failed()
        self.seen["eviction under pressure"] += model.compute(expected, set()) > 0
        assert list(found.experts) == expected
        slot_of = dict(zip(found.experts, found.slots, strict=True))
        pairs = [i for i, expert in enumerate(current.flat) if expert in slot_of]
        assert found.pair_idx.tolist() == pairs
        assert found.pair_slots.tolist() == [slot_of[current.flat[i]] for i in pairs]
        assert found.pair_idx.dtype == found.pair_slots.dtype == np.int32
        current.pairs_done += pairs
        current.num_done += 1
        current.needs_fence = True
        current.last_pass = found

    def read_slots(self, layer, found):
        """A computation, not yet evaluated, that reads the slots of a pass."""
        slots = mx.array(found.slots)
        output = mx.concatenate(
            [
                part[slots].view(mx.uint8).reshape(len(found.slots), -1)
                for part in self.arena.bank(layer).values()
            ],
            axis=1,
        )
        expected = [b"".join(self.files.part_bytes(layer, e)) for e in found.experts]
        self.outputs.append((output, expected))
        return output

    def take_failed(self, error):
        failed = {self.files.find(r.path, r.offset) for r in self.reader.take_failed()}
        assert (error.layer, error.expert) == min(failed)
        return failed

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "arena"):
            return
        self.arena.check()
        for layer, model in self.models.items():
            resident = self.arena.resident(layer)
            assert list(resident) == sorted(model.last_used)
            if self.arena.is_resident:
                assert all(slot == expert for expert, slot in resident.items())
            parts = [np.array(p.view(mx.uint8)) for p in self.arena.bank(layer).values()]
            for expert, slot in resident.items():
                found = [part[slot].tobytes() for part in parts]
                assert found == self.files.part_bytes(layer, expert), "A5"

    @invariant()
    def counts_what_the_model_counts(self):
        if not hasattr(self, "arena"):
            return
        stats = self.arena.stats()
        for layer, each in zip(LAYERS, stats.layers, strict=True):
            counts = self.models[layer].counts
            for name in (
                "expert_hits",
                "expert_misses",
                "layer_steps",
                "split_layer_steps",
                "passes",
            ):
                assert getattr(each, name) == counts[name], name
            assert each.bytes_read == counts["demanded"] * self.files.expert_nbytes, "A4"
        demanded = sum(model.counts["demanded"] for model in self.models.values())
        assert stats.reads == demanded * len(self.files.layers[0].parts)
        assert stats.bytes_transferred == self.reader.bytes_transferred
        assert stats.bytes_speculative == self.preloaded_bytes

    def teardown(self):
        if not hasattr(self, "arena"):
            return
        # Evaluating only now is as late as an output can be: were a slot overwritten before its
        # fence was waited for, an output would show the new bytes (A3).
        for output, expected in self.outputs:
            assert [row.tobytes() for row in np.array(output)] == expected, "A3"
        self.arena.close()
        self.seen["recovered error"] += self.reader.num_recovered_errors > 0
        self.seen.update(self.reader.seen)


def run_machine(folder, *, max_examples, step_count):
    class Machine(ArenaMachine):
        files: ClassVar = ExpertFiles(folder, num_layers=2, num_experts=NUM_EXPERTS)
        seen: ClassVar = Counter()

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=max_examples, stateful_step_count=step_count)
    )
    return Machine.seen


def test_arena_agrees_with_a_dict_under_faults(tmp_path):
    seen = run_machine(tmp_path, max_examples=80, step_count=40)
    assert {name for name in MUST_HAPPEN if not seen[name]} == set()
