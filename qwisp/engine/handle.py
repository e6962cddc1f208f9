"""A request as its owner sees it, from any thread: its tokens, its result, a way to cancel."""

import queue
import threading
from collections.abc import Iterator
from typing import Self

from qwisp.types import Completion, FinishReason, Request, TokenEvent


class Handle:
    """One submitted request.

    The engine's thread calls `emit` and `finish`; everything else may be called from any thread.
    """

    def __init__(self, request: Request, prompt_ids: tuple[int, ...], submitted_at: float) -> None:
        self.request = request
        self.prompt_ids = prompt_ids
        self.submitted_at = submitted_at
        """Reading of the engine's clock, in seconds."""
        self._events: queue.SimpleQueue[TokenEvent | None] = queue.SimpleQueue()
        self._finished = threading.Event()
        self._cancelled = threading.Event()
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[TokenEvent]:
        """Tokens as they are generated, until the request ends.

        Each event is delivered once, so iterate from one place.

        Raises:
            QwispError: the request failed; tokens generated before were delivered.
        """
        while (event := self._events.get()) is not None:
            yield event
        self._events.put(None)
        completion = self.result()
        if completion.error is not None:
            raise completion.error

    def result(self, timeout: float | None = None) -> Completion:
        """The completion, whatever way the request ended; a failure is in its `error`.

        Raises:
            TimeoutError: the request has not ended after `timeout` seconds; it goes on.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the request has not ended after {timeout} s")
        assert self._completion is not None
        return self._completion

    def cancel(self) -> None:
        """Ask the engine to end the request; it does so within a layer of prefill or a token.

        Does nothing once the request has ended.
        """
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def reason_to_end(self, now: float) -> FinishReason | None:
        """Why the request should go no further at `now` on the engine's clock, if it should not."""
        if self.is_cancelled:
            return "cancelled"
        deadline_s = self.request.deadline_s
        if deadline_s is not None and now - self.submitted_at >= deadline_s:
            return "deadline"
        return None

    def emit(self, event: TokenEvent) -> None:
        """Deliver one token. Engine only."""
        assert self._completion is None
        self._events.put(event)

    def finish(self, completion: Completion) -> None:
        """End the request, exactly once. Engine only."""
        assert self._completion is None, "L5: a request ended twice"
        self._completion = completion
        self._finished.set()
        self._events.put(None)


class TokenStream:
    """Iterates over the tokens of one request. Leaving it early, by `close` or by dropping it,
    cancels.

    Iterating raises QwispError if the request failed.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._events = iter(handle)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenEvent:
        return next(self._events)

    def close(self) -> None:
        """Cancel the request, unless it has ended."""
        self._handle.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
