import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwisp.arena.passes import PassPlan, plan_passes
from qwisp.errors import ConfigError, InvariantError


@st.composite
def demands(draw):
    """A union in any order, what is resident, and a capacity that can hold that."""
    capacity = draw(st.integers(1, 12))
    union = draw(st.lists(st.integers(0, 39), unique=True, max_size=40))
    resident = draw(st.sets(st.integers(0, 39), max_size=capacity))
    return union, resident, capacity


@given(demands())
def test_every_expert_is_computed_in_exactly_one_pass(demand):
    union, resident, capacity = demand
    computed = [
        expert for each in plan_passes(union, resident, capacity) for expert in each.experts
    ]
    assert sorted(computed) == sorted(union)


@given(demands())
def test_every_missing_expert_is_read_exactly_once_and_no_resident_one(demand):
    union, resident, capacity = demand
    plan = plan_passes(union, resident, capacity)
    reads = [expert for each in plan for expert in each.reads]
    assert sorted(reads) == sorted(set(union) - resident)
    assert all(set(each.reads) <= set(each.experts) for each in plan)


@given(demands())
def test_no_plan_could_have_fewer_passes(demand):
    union, resident, capacity = demand
    assert len(plan_passes(union, resident, capacity)) == math.ceil(len(union) / capacity)


@given(demands())
def test_the_plan_runs_in_the_slots_there_are(demand):
    """Played on a set: each pass fits, and what it does not read is there, whoever was evicted."""
    union, resident, capacity = demand
    for number, each in enumerate(plan_passes(union, resident, capacity)):
        assert 1 <= len(each.experts) <= capacity
        computed_without_reading = set(each.experts) - set(each.reads)
        if number == 0:
            assert computed_without_reading == set(union) & resident
        else:
            assert not computed_without_reading


@given(demands())
def test_experts_ascend_within_a_pass(demand):
    for each in plan_passes(*demand):
        assert list(each.experts) == sorted(each.experts)
        assert list(each.reads) == sorted(each.reads)


def test_resident_experts_go_first_and_the_lowest_missing_ones_fill_up():
    assert plan_passes([7, 1, 3, 5, 2, 9], {3, 9, 11}, 4) == (
        PassPlan(experts=(1, 2, 3, 9), reads=(1, 2)),
        PassPlan(experts=(5, 7), reads=(5, 7)),
    )


def test_an_empty_union_needs_no_pass():
    assert plan_passes([], {1}, 4) == ()


def test_a_capacity_below_one_is_refused():
    with pytest.raises(ConfigError, match="capacity=0"):
        plan_passes([1], set(), 0)


def test_more_residents_than_slots_are_refused():
    with pytest.raises(InvariantError, match=r"^A2"):
        plan_passes([1], {1, 2, 3}, 2)
