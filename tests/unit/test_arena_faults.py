"""A5: a failed or short read leaves its slot empty, and the arena usable."""

import errno
import os

import mlx.core as mx
import pytest

from qwisp.errors import ExpertReadError, InvariantError
from tests.arena_steps import LAYER, Doomed, rows, run, slot_bytes


def test_failed_read_leaves_its_slot_empty(files, open_arena):
    reader = Doomed(files)
    arena = open_arena(4, reader)
    reader.experts = {7}
    with pytest.raises(ExpertReadError) as caught:
        run(arena, rows(2, 7))
    assert (caught.value.layer, caught.value.expert) == (LAYER, 7)
    part = files.layers[0].parts[0]
    assert caught.value.path == part.path
    assert caught.value.offset == part.offset + 7 * part.nbytes + 3
    assert caught.value.__cause__.errno == errno.EIO
    assert list(arena.resident(LAYER)) == [2]
    arena.check()


def test_others_of_a_failed_wave_stay_and_later_steps_work(files, open_arena):
    reader = Doomed(files)
    arena = open_arena(4, reader)
    run(arena, rows(0, 1))
    reader.experts = {5}
    with pytest.raises(ExpertReadError):
        run(arena, rows(0, 4, 5, 6))
    assert list(arena.resident(LAYER)) == [0, 4, 6]
    reader.experts = set()
    (found,) = run(arena, rows(4, 5))
    for expert, slot in zip(found.experts, found.slots, strict=True):
        assert slot_bytes(arena, slot) == files.part_bytes(LAYER, expert)
    assert arena.stats().expert_misses == 2 + 3 + 1
    arena.check()


def test_a_failed_expert_is_read_anew_by_the_next_step(files, open_arena):
    reader = Doomed(files)
    arena = open_arena(4, reader)
    reader.experts = {7}
    for _ in range(3):
        with pytest.raises(ExpertReadError):
            run(arena, rows(2, 7))
    assert reader.requests.count((LAYER, 7)) == 3 * len(files.layers[0].parts)
    assert reader.requests.count((LAYER, 2)) == len(files.layers[0].parts)


def test_a_step_is_over_after_a_failed_read(files, open_arena):
    reader = Doomed(files)
    arena = open_arena(2, reader)
    reader.experts = {3}
    step = arena.begin(LAYER, rows(0, 1, 2, 3), kind="decode")
    next(step)
    step.fence(mx.zeros(1))
    with pytest.raises(ExpertReadError):
        next(step)
    with pytest.raises(InvariantError, match=r"^A4"):
        next(step)


def test_a_file_that_ends_early_is_named(files, open_arena):
    part = files.layers[0].parts[2]
    os.truncate(part.path, part.offset + 8 * part.nbytes + 1)
    arena = open_arena(4)
    run(arena, rows(2, 7))
    with pytest.raises(ExpertReadError, match=rf"expert 8 of layer 1: cannot read {part.path}"):
        run(arena, rows(2, 8))
    assert list(arena.resident(LAYER)) == [2, 7]


def test_reads_of_an_interrupted_step_are_settled_by_the_next(files, open_arena):
    """A Ctrl-C while waiting must not let go of slots that threads still write."""

    class Interrupting(Doomed):
        is_armed = True

        def submit(self, request):
            self.inner = super().submit(request)
            return _InterruptedOnce(self, self.inner)

    class _InterruptedOnce:
        def __init__(self, reader, inner):
            self.reader, self.inner = reader, inner

        def result(self):
            if self.reader.is_armed:
                self.reader.is_armed = False
                raise KeyboardInterrupt
            return self.inner.result()

    arena = open_arena(2, Interrupting(files))
    with pytest.raises(KeyboardInterrupt):
        run(arena, rows(0, 1))
    assert arena.resident(LAYER) == {}
    arena.check()
    (found,) = run(arena, rows(1, 2))
    arena.check()
    assert slot_bytes(arena, found.slots[1]) == files.part_bytes(LAYER, 2)


def test_a_closed_reader_stops_a_step_and_leaves_no_slot_waiting(open_arena):
    arena = open_arena(2)
    arena.close()
    with pytest.raises(RuntimeError):
        run(arena, rows(0, 1))
    arena.begin(LAYER, rows(0, 1), kind="decode")
    arena.check()
    assert arena.resident(LAYER) == {}
