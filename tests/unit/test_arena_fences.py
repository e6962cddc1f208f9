"""A3: a slot is never overwritten while a computation may read it."""

import mlx.core as mx
import numpy as np
import pytest

from qwisp.arena.fences import Fences
from qwisp.errors import InvariantError
from tests.arena_steps import LAYER, rows, run, slot_bytes, slow_copy_of_slots


def overwritten_experts(arena, files, *, submit):
    """Experts whose pass computed with another expert's bytes, in a step of several passes."""
    outputs = []
    step = arena.begin(LAYER, rows(0, 1, 2, 3, 4, 5), kind="decode")
    for found in step:
        output = slow_copy_of_slots(arena, found)
        if submit:
            mx.async_eval(output)
        step.fence(output)
        outputs.append((found.experts, output))
    return [
        expert
        for experts, output in outputs
        for expert, row in zip(experts, np.array(output), strict=True)
        if row.tobytes() != files.part_bytes(LAYER, expert)[0]
    ]


@pytest.mark.parametrize("submit", [False, True], ids=["not submitted", "running"])
def test_slot_is_not_overwritten_before_its_fence(files, open_arena, submit):
    assert overwritten_experts(open_arena(2), files, submit=submit) == []


@pytest.mark.parametrize("submit", [False, True], ids=["not submitted", "running"])
def test_an_arena_that_forgets_fences_is_caught_by_the_test_above(
    files, open_arena, monkeypatch, submit
):
    monkeypatch.setattr(Fences, "wait", Fences._keep_only_unfenced)
    assert overwritten_experts(open_arena(2), files, submit=submit) != []


def test_an_arena_that_does_not_wait_at_all_stops_itself(files, open_arena, monkeypatch):
    monkeypatch.setattr(Fences, "wait", lambda self: None)
    with pytest.raises(InvariantError, match=r"^A3: slot 0 of layer 1"):
        overwritten_experts(open_arena(2), files, submit=False)


def test_the_next_step_waits_for_the_fence_of_the_last_one(files, open_arena):
    arena = open_arena(2)
    step = arena.begin(LAYER, rows(0, 1), kind="decode")
    found = next(step)
    output = slow_copy_of_slots(arena, found)
    step.fence(output)
    run(arena, rows(2, 3))
    assert [row.tobytes() for row in np.array(output)] == [
        files.part_bytes(LAYER, expert)[0] for expert in (0, 1)
    ]


def test_a_running_computation_of_an_abandoned_step_keeps_its_slots(files, open_arena):
    arena = open_arena(2)
    step = arena.begin(LAYER, rows(0, 1), kind="decode")
    output = slow_copy_of_slots(arena, next(step))
    mx.async_eval(output)
    run(arena, rows(2, 3))
    assert [row.tobytes() for row in np.array(output)] == [
        files.part_bytes(LAYER, expert)[0] for expert in (0, 1)
    ]


def test_a_pass_without_a_fence_stops_the_step(open_arena):
    step = open_arena(2).begin(LAYER, rows(0, 1, 2, 3), kind="decode")
    next(step)
    with pytest.raises(InvariantError, match=r"^A3"):
        next(step)


def test_the_last_pass_needs_a_fence_too(open_arena):
    step = open_arena(2).begin(LAYER, rows(0, 1), kind="decode")
    next(step)
    with pytest.raises(InvariantError, match=r"^A3"):
        next(step)


def test_a_fence_belongs_to_one_pass(open_arena):
    step = open_arena(2).begin(LAYER, rows(0, 1), kind="decode")
    with pytest.raises(InvariantError, match=r"^A3"):
        step.fence(mx.zeros(1))
    next(step)
    step.fence(mx.zeros(1))
    with pytest.raises(InvariantError, match=r"^A3"):
        step.fence(mx.zeros(1))


def test_a_computation_that_fails_leaves_the_arena_usable(files, open_arena):
    arena = open_arena(2)
    step = arena.begin(LAYER, rows(0, 1, 2, 3), kind="decode")
    next(step)
    step.fence(mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu))
    with pytest.raises(RuntimeError, match="Inverse"):
        next(step)
    (found,) = run(arena, rows(4, 5))
    assert slot_bytes(arena, found.slots[0]) == files.part_bytes(LAYER, 4)
    arena.check()


def test_outputs_are_let_go_when_the_next_step_begins(open_arena):
    arena = open_arena(2)
    before = mx.get_active_memory()
    for number in range(20):
        step = arena.begin(LAYER, rows(number % 4, 4), kind="decode")
        for _ in step:
            step.fence(mx.zeros((1 << 20,)) + 1)
    assert mx.get_active_memory() - before <= 2 * 4 * (1 << 20)
