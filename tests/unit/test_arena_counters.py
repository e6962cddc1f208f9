import pytest

from qwisp.arena.arena import ExpertArena
from qwisp.arena.reader import PreadReader
from qwisp.arena.source import ExpertLayer
from qwisp.errors import ConfigError, InvariantError
from tests.arena_steps import LAYER, NUM_EXPERTS, Doomed, rows, run, slow_copy_of_slots


@pytest.mark.parametrize("capacity", [0, -1, NUM_EXPERTS + 1])
def test_a_capacity_that_cannot_work_is_refused(open_arena, capacity):
    with pytest.raises(ConfigError, match=rf"capacity={capacity} is not in 1\.\.12"):
        open_arena(capacity)


def test_layers_of_different_numbers_of_experts_are_refused(files):
    layers = [files.layers[0], ExpertLayer(9, NUM_EXPERTS + 1, files.layers[0].parts)]
    with pytest.raises(ConfigError, match="differ in their number of experts"):
        ExpertArena(layers, 4, PreadReader(1))


@pytest.mark.parametrize("times", [0, 2])
def test_no_layer_and_the_same_layer_twice_are_refused(files, times):
    with pytest.raises(ConfigError, match="each once"):
        ExpertArena(files.layers[:1] * times, 4, PreadReader(1))


def test_time_waiting_for_reads_and_for_computation_is_counted_apart(files, open_arena):
    now = [0.0]

    class Slow(Doomed):
        def submit(self, request):
            pending = super().submit(request)
            return type("Pending", (), {"result": lambda _: (tick(1.0), pending.result())[1]})()

    def tick(seconds):
        now[0] += seconds

    arena = open_arena(2, Slow(files), clock=lambda: now[0])
    run(arena, rows(0, 1))
    assert arena.stats().read_wait_s == 2 * len(files.layers[0].parts)
    assert arena.stats().compute_wait_s == 0.0


def test_time_waiting_for_a_fence_is_compute_wait(open_arena):
    arena = open_arena(2)
    step = arena.begin(LAYER, rows(0, 1), kind="decode")
    step.fence(slow_copy_of_slots(arena, next(step)))
    before = arena.stats()
    arena.begin(LAYER, rows(0, 1), kind="decode")
    after = arena.stats()
    assert after.compute_wait_s > before.compute_wait_s + 1e-3
    assert after.read_wait_s == before.read_wait_s


def test_check_names_the_invariant_that_is_broken(open_arena):
    arena = open_arena(2)
    run(arena, rows(0, 1))
    state = arena._layers[LAYER]
    state.counters.bytes_read += 1
    with pytest.raises(InvariantError, match=r"^A4"):
        arena.check()
    state.counters.bytes_read -= 1
    state.table.evict(0)
    with pytest.raises(InvariantError, match=r"^A3"):
        arena.check()
