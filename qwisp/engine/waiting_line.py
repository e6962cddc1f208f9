"""Requests that wait for the engine: first come, first served, whoever gives up leaves the line."""

import threading
from collections import deque

from qwisp.engine.handle import Handle
from qwisp.errors import EngineClosed


class WaitingLine:
    """A queue that any thread may join and the engine's thread takes from.

    Invariant L4: handles are taken in the order they were added.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._handles: deque[Handle] = deque()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nobody may join any more."""
        return self._is_closed

    def add(self, handle: Handle) -> None:
        """Join the end of the line.

        Raises:
            EngineClosed: the line is closed.
        """
        with self._changed:
            if self._is_closed:
                raise EngineClosed("the engine is closed and takes no more requests")
            self._handles.append(handle)
            self._changed.notify()

    def take(self) -> Handle | None:
        """Wait for the head of the line and take it; None once the line is closed."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._handles) or self._is_closed)
            return None if self._is_closed else self._handles.popleft()

    def remove_ended(self, now: float) -> list[Handle]:
        """Take out those that were cancelled or whose deadline has passed at `now`."""
        if not self._handles:
            return []
        with self._changed:
            ended = [handle for handle in self._handles if handle.reason_to_end(now) is not None]
            for handle in ended:
                self._handles.remove(handle)
        return ended

    def close(self) -> None:
        """Let nobody join any more and wake who waits in `take`. May be called again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def drain(self) -> list[Handle]:
        """Take out all that still wait."""
        with self._changed:
            waiting, self._handles = list(self._handles), deque()
        return waiting
