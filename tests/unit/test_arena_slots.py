import pytest

from qwisp.arena.slots import SlotTable
from qwisp.errors import InvariantError


def filled(num_experts=8, capacity=3, experts=(5, 2)):
    table = SlotTable(num_experts, capacity)
    for tick, expert in enumerate(experts, start=1):
        table.start_read(expert)
        table.finish_read(expert, tick)
    table.check()
    return table


def test_a_slot_goes_from_empty_through_reading_to_ready_and_back():
    table = SlotTable(num_experts=8, capacity=3)
    assert table.state(0) == "empty"
    assert table.start_read(5) == 0
    assert table.state(0) == "reading"
    table.finish_read(5, tick=1)
    assert table.state(0) == "ready"
    assert table.slots_of([5]) == (0,)
    assert table.evict(5) == 0
    assert table.state(0) == "empty"


def test_a_slot_being_read_cannot_be_looked_up():
    table = filled()
    table.start_read(7)
    assert 7 not in table.resident
    with pytest.raises(InvariantError, match=r"^A5: expert 7"):
        table.slots_of([5, 7])


def test_a_failed_read_empties_its_slot():
    table = filled()
    slot = table.start_read(7)
    table.fail_read(7)
    assert table.state(slot) == "empty"
    assert table.num_empty == 1
    table.check()


def test_the_lowest_empty_slot_is_taken_first():
    table = filled(experts=(5, 2, 6))
    table.evict(2)
    table.evict(5)
    assert [table.start_read(7), table.start_read(1)] == [0, 1]


def test_with_a_slot_for_every_expert_each_has_its_own():
    table = SlotTable(num_experts=4, capacity=4)
    assert [table.start_read(expert) for expert in (2, 0, 3, 1)] == [2, 0, 3, 1]


def test_an_expert_cannot_have_two_slots():
    with pytest.raises(InvariantError, match=r"^A1"):
        filled().start_read(5)
    reading = filled()
    reading.start_read(7)
    with pytest.raises(InvariantError, match=r"^A1"):
        reading.start_read(7)


def test_a_full_table_takes_no_more():
    with pytest.raises(InvariantError, match=r"^A2"):
        filled(experts=(5, 2, 6)).start_read(1)


def test_what_is_not_resident_is_neither_used_nor_evicted():
    with pytest.raises(InvariantError, match=r"^A5"):
        filled().touch([5, 6], tick=9)
    with pytest.raises(InvariantError, match=r"^A2"):
        filled().evict(6)
    with pytest.raises(InvariantError, match=r"^A5"):
        filled().finish_read(6, tick=9)


@pytest.mark.parametrize(
    ("invariant", "corrupt"),
    [
        ("A1", lambda t: t._slot_of.__setitem__(2, 0)),
        ("A1", lambda t: t._expert_in.__setitem__(0, 3)),
        ("A1", lambda t: t._reading.__setitem__(2, 2)),
        ("A2", lambda t: t._empty.clear()),
        ("A2", lambda t: t._empty.append(0)),
        ("A2", lambda t: t._expert_in.__setitem__(2, 4)),
        ("A5", lambda t: t._slot_of.__setitem__(4, 2)),
        ("A5", lambda t: t._last_used.pop(2)),
    ],
)
def test_check_names_the_invariant_that_is_broken(invariant, corrupt):
    table = filled()
    corrupt(table)
    with pytest.raises(InvariantError, match=f"^{invariant}"):
        table.check()
