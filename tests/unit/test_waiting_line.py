"""The waiting line against a plain list, and the order in which an engine serves."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qwisp import Engine, EngineClosed, Request
from qwisp.engine.handle import Handle
from qwisp.engine.waiting_line import WaitingLine


class WaitingLineMachine(RuleBasedStateMachine):
    """L4: handles come out in the order they joined, without those that gave up."""

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine()
        self.model: list[Handle] = []
        self.now = 0.0

    @rule(deadline_s=st.none() | st.integers(1, 5))
    def join(self, deadline_s: int | None) -> None:
        handle = Handle(Request([1], deadline_s=deadline_s), (1,), self.now)
        if self.line.is_closed:
            with pytest.raises(EngineClosed):
                self.line.add(handle)
            return
        self.line.add(handle)
        self.model.append(handle)

    @precondition(lambda self: self.model and not self.line.is_closed)
    @rule()
    def take(self) -> None:
        assert self.line.take() is self.model.pop(0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.model)).cancel()

    @rule(passed_s=st.integers(0, 3))
    def sweep(self, passed_s: int) -> None:
        self.now += passed_s
        gone = [h for h in self.model if h.is_cancelled or self._is_late(h)]
        assert self.line.remove_ended(self.now) == gone
        self.model = [handle for handle in self.model if handle not in gone]

    @precondition(lambda self: len(self.model) > 2)
    @rule()
    def close(self) -> None:
        self.line.close()
        assert self.line.take() is None
        assert self.line.drain() == self.model
        self.model = []

    @invariant()
    def nobody_is_in_the_line_who_is_not_in_the_model(self) -> None:
        assert list(self.line._handles) == self.model

    def _is_late(self, handle: Handle) -> bool:
        deadline_s = handle.request.deadline_s
        return deadline_s is not None and self.now - handle.submitted_at >= deadline_s


TestWaitingLine = WaitingLineMachine.TestCase
TestWaitingLine.settings = settings(max_examples=60, stateful_step_count=40)


def test_take_waits_until_somebody_joins() -> None:
    line, taken = WaitingLine(), []
    taker = threading.Thread(target=lambda: taken.append(line.take()))
    taker.start()
    handle = Handle(Request([1]), (1,), 0.0)
    line.add(handle)
    taker.join(timeout=10)
    assert taken == [handle]


def test_L4_requests_are_served_in_the_order_of_their_submission(engine: Engine) -> None:
    served: list[int] = []

    def request(number: int) -> Request:
        # Later requests are shorter: none of them may overtake.
        return Request(
            [7] * (40 - 8 * number), max_tokens=2, on_prefill=lambda *_: served.append(number)
        )

    for completion in engine.run([request(number) for number in range(5)]):
        assert completion.error is None
    assert sorted(set(served), key=served.index) == [0, 1, 2, 3, 4]
    assert served == sorted(served)
