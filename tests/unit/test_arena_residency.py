import mlx.core as mx
import numpy as np
import pytest

from qwisp.arena.trace import TraceWriter, read_trace
from qwisp.errors import ConfigError, ExpertReadError, InvariantError
from tests.arena_steps import LAYER, NUM_EXPERTS, Doomed, rows, run, slot_bytes


def test_a_routed_expert_is_resident_afterwards_with_its_bytes(files, open_arena):
    arena = open_arena(4)
    (only,) = run(arena, rows(7, 2))
    assert only.experts == (2, 7)
    for expert, slot in zip(only.experts, only.slots, strict=True):
        assert slot_bytes(arena, slot) == files.part_bytes(LAYER, expert)
    arena.check()


def test_a_resident_expert_is_not_read_again(open_arena):
    arena = open_arena(4)
    first = run(arena, rows(7, 2))
    before = arena.stats()
    assert run(arena, rows(2, 7))[0].slots == first[0].slots
    after = arena.stats()
    assert (after.bytes_read, after.expert_hits, after.expert_misses) == (before.bytes_read, 2, 2)


def test_the_least_recently_used_expert_gives_up_its_slot(open_arena):
    arena = open_arena(4)
    for routes in (rows(0, 1), rows(2, 3), rows(0, 1), rows(4, 5)):
        run(arena, routes)
    assert list(arena.resident(LAYER)) == [0, 1, 4, 5]


def test_layers_do_not_share_slots(open_arena):
    arena = open_arena(2)
    run(arena, rows(0, 1), layer=1)
    run(arena, rows(2, 3), layer=3)
    assert list(arena.resident(1)) == [0, 1]
    assert list(arena.resident(3)) == [2, 3]


def test_a_union_above_capacity_is_computed_in_passes_that_cover_each_pair_once(open_arena):
    arena = open_arena(3)
    routes = rows(5, 1, 2, 5, 7, 3, 1, 8, 0, 5)
    passes = run(arena, routes)
    assert [p.experts for p in passes] == [(0, 1, 2), (3, 5, 7), (8,)]
    assert [p.pair_idx.tolist() for p in passes] == [[1, 2, 6, 8], [0, 3, 4, 5, 9], [7]]
    for found in passes:
        slot_of = dict(zip(found.experts, found.slots, strict=True))
        pair_experts = routes.reshape(-1)[found.pair_idx].tolist()
        assert found.pair_slots.tolist() == [slot_of[expert] for expert in pair_experts]
    stats = arena.stats()
    assert (stats.layer_steps, stats.split_layer_steps, stats.passes) == (1, 1, 3)
    assert (stats.expert_hits, stats.expert_misses) == (0, 7)


def test_resident_experts_of_an_overflowing_union_are_not_read(open_arena):
    arena = open_arena(3)
    run(arena, rows(8, 9))
    before = arena.stats().expert_misses
    passes = run(arena, rows(0, 1, 2, 8, 3, 9))
    assert passes[0].experts == (0, 8, 9)
    assert arena.stats().expert_misses - before == 4


def test_no_rows_need_no_pass(open_arena):
    arena = open_arena(3)
    step = arena.begin(LAYER, np.zeros((0, 2), dtype=np.int32), kind="prefill")
    assert step.num_passes == 0
    assert list(step) == []
    assert arena.stats().layer_steps == 1


def test_an_abandoned_step_leaves_the_arena_usable(files, open_arena):
    arena = open_arena(2)
    step = arena.begin(LAYER, rows(0, 1, 2, 3), kind="decode")
    next(step)
    (found,) = run(arena, rows(4, 1))
    assert slot_bytes(arena, found.slots[1]) == files.part_bytes(LAYER, 4)
    with pytest.raises(InvariantError, match=r"^A"):
        next(step)
    arena.check()


def test_a_step_ends_when_another_of_its_layer_begins(open_arena):
    arena = open_arena(2)
    step = arena.begin(LAYER, rows(0, 1), kind="decode")
    arena.begin(LAYER, rows(0, 1), kind="decode")
    with pytest.raises(InvariantError, match=r"^A4"):
        next(step)


def test_steps_of_two_layers_may_overlap(open_arena):
    arena = open_arena(2)
    one = arena.begin(1, rows(0, 1, 2, 3), kind="decode")
    next(one)
    three = arena.begin(3, rows(0, 1, 2, 3), kind="decode")
    one.fence(mx.zeros(1))
    next(three)
    three.fence(mx.zeros(1))
    assert next(one).experts == next(three).experts == (2, 3)
    arena.check()


@pytest.mark.parametrize("bad", [NUM_EXPERTS, -1])
def test_a_route_to_no_expert_is_refused_and_counts_nothing(open_arena, bad):
    arena = open_arena(2)
    with pytest.raises(InvariantError, match=r"^S1"):
        arena.begin(LAYER, np.array([[0, bad]]), kind="decode")
    assert arena.stats().layer_steps == 0


def test_preload_puts_each_expert_into_the_slot_of_its_id(files, open_arena):
    arena = open_arena(NUM_EXPERTS)
    assert arena.is_resident
    progress = []
    arena.preload(lambda done, total: progress.append((done, total)))
    for layer in files.layer_ids:
        assert arena.resident(layer) == {expert: expert for expert in range(NUM_EXPERTS)}
        for expert in range(NUM_EXPERTS):
            assert slot_bytes(arena, expert, layer) == files.part_bytes(layer, expert)
    half = NUM_EXPERTS * files.expert_nbytes
    assert progress == [(half, 2 * half), (2 * half, 2 * half)]
    stats = arena.stats()
    assert stats.bytes_speculative == stats.bytes_transferred == 2 * half == arena.nbytes
    assert stats.bytes_read == stats.reads == 0


def test_a_resident_arena_reads_nothing_and_its_slots_are_the_routes(open_arena):
    arena = open_arena(NUM_EXPERTS)
    arena.preload()
    (found,) = run(arena, rows(3, 9, 9, 0))
    assert found.slots == found.experts == (0, 3, 9)
    assert found.pair_slots.tolist() == [3, 9, 9, 0]
    stats = arena.stats()
    assert (stats.expert_hits, stats.expert_misses, stats.bytes_read) == (3, 0, 0)


def test_an_observed_step_counts_as_one_that_was_begun(files, open_arena, tmp_path):
    def traced(name):
        path = tmp_path / name
        return path, TraceWriter.create(
            path, fingerprint="", num_experts=NUM_EXPERTS, top_k=2, layers=files.layer_ids
        )

    (begun_path, begun_trace), (seen_path, seen_trace) = traced("begun"), traced("seen")
    begun = open_arena(NUM_EXPERTS, trace=begun_trace)
    seen = open_arena(NUM_EXPERTS, trace=seen_trace)
    begun.preload()
    seen.preload()
    for routes in (rows(3, 9, 9, 0), rows(), rows(1, 2)):
        run(begun, routes)
        seen.observe(LAYER, routes, kind="decode")
    assert begun.stats().layers == seen.stats().layers
    begun.close()
    seen.close()
    assert begun_path.read_bytes() == seen_path.read_bytes()
    assert next(step.routes.tolist() for step in read_trace(seen_path)) == [[3, 9], [9, 0]]


def test_observing_an_arena_that_lacks_experts_is_refused(open_arena):
    with pytest.raises(InvariantError, match=r"^A5"):
        open_arena(4).observe(LAYER, rows(0, 1), kind="decode")


def test_a_preload_that_failed_goes_on_where_it_stopped(files, open_arena):
    reader = Doomed(files)
    arena = open_arena(NUM_EXPERTS, reader)
    reader.experts = {4, 6}
    with pytest.raises(ExpertReadError, match="expert 4 of layer 1"):
        arena.preload()
    assert list(arena.resident(1)) == [0, 1, 2, 3, 5, 7, 8, 9, 10, 11]
    reader.experts = set()
    reader.requests.clear()
    arena.preload()
    assert {expert for layer, expert in reader.requests if layer == 1} == {4, 6}
    assert slot_bytes(arena, 6) == files.part_bytes(LAYER, 6)


def test_a_step_ends_when_its_arena_is_preloaded(open_arena):
    arena = open_arena(NUM_EXPERTS)
    step = arena.begin(LAYER, rows(0, 1), kind="decode")
    arena.preload()
    with pytest.raises(InvariantError, match=r"^A4"):
        next(step)
    arena.check()


def test_a_streaming_arena_cannot_be_preloaded(open_arena):
    with pytest.raises(ConfigError, match="capacity=4 of 12"):
        open_arena(4).preload()
