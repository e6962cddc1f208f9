import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwisp.arena.eviction import least_recently_used
from qwisp.errors import InvariantError

ticks = st.dictionaries(st.integers(0, 63), st.integers(0, 5), max_size=32)


def test_the_lowest_tick_goes_first():
    assert least_recently_used({4: 9, 5: 2, 6: 7}, set(), 2) == (5, 6)


def test_ties_go_to_the_lower_expert_whatever_the_order_of_the_mapping():
    assert least_recently_used({9: 1, 2: 1, 5: 1}, set(), 2) == (2, 5)
    assert least_recently_used({5: 1, 2: 1, 9: 1}, set(), 2) == (2, 5)


def test_a_pinned_expert_is_never_evicted():
    assert least_recently_used({4: 0, 5: 1, 6: 2}, {4, 6}, 1) == (5,)


def test_evicting_more_than_may_go_is_refused():
    with pytest.raises(InvariantError, match=r"^A2"):
        least_recently_used({4: 0, 5: 1}, {4}, 2)


@given(ticks, st.data())
def test_victims_were_used_no_later_than_any_expert_that_stays(last_used, data):
    pinned = data.draw(st.sets(st.integers(0, 63)))
    free_to_go = set(last_used) - pinned
    victims = least_recently_used(last_used, pinned, data.draw(st.integers(0, len(free_to_go))))
    assert set(victims) <= free_to_go
    latest = max(((last_used[e], e) for e in victims), default=(-1, -1))
    assert all(latest < (last_used[e], e) for e in free_to_go - set(victims))
