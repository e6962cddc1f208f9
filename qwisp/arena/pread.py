"""One read at a time, on the calling thread: retries, short reads, open files, the rate limit."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qwisp.arena.rate_limit import RateLimit
from qwisp.arena.requests import ReadFailure, ReadOutcome, ReadRequest
from qwisp.errors import ConfigError

Preadv = Callable[[int, Sequence[memoryview], int], int]
"""The system call: (descriptor, buffers, offset) -> bytes moved, 0 at the end of the file."""


class BlockingReader:
    """Reads with `os.preadv`. Any number of threads may use one at the same time.

    A short read goes on where it stopped. An `OSError` begins the request again from its first
    byte, at most `retries` times. The end of the file is an error that is not retried. Each file is
    opened once and stays open until `close()`.
    """

    def __init__(
        self,
        *,
        read_gbs_limit: float | None = None,
        retries: int = 2,
        preadv: Preadv = os.preadv,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Opens nothing yet.

        Args:
            read_gbs_limit: Simulates a disk of this many GB/s (1e9 bytes); None: no limit.
            retries: Further attempts after an `OSError`.
            preadv: The system call; tests inject faults here.
            clock: Seconds, for the limit.
            sleep: Waits, for the limit.

        Raises:
            ConfigError: a number is out of range.
        """
        if retries < 0:
            raise ConfigError(f"retries={retries} is below 0")
        if read_gbs_limit is not None and not read_gbs_limit > 0:
            raise ConfigError(f"read_gbs_limit={read_gbs_limit} must be above 0, or None")
        self._retries = retries
        self._preadv = preadv
        self._limit = (
            None
            if read_gbs_limit is None
            else RateLimit(read_gbs_limit * 1e9, clock=clock, sleep=sleep)
        )
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, request: ReadRequest) -> ReadOutcome:
        """Fills the request's buffers, or says why it could not."""
        transferred = 0
        for attempts_left in reversed(range(self._retries + 1)):
            outcome = self._attempt(request)
            transferred += outcome.bytes_transferred
            if outcome.failure is None:
                break
            if attempts_left == 0 or isinstance(outcome.failure.cause, EOFError):
                break
        return ReadOutcome(transferred, outcome.failure)

    def close(self) -> None:
        """Closes the files. No read may be running. May be called again."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _attempt(self, request: ReadRequest) -> ReadOutcome:
        done = 0
        nbytes = request.nbytes
        try:
            descriptor = self._descriptor(request.path)
            while done < nbytes:
                count = self._preadv_limited(
                    descriptor, _after(request.buffers, done), request.offset + done
                )
                if count == 0:
                    raise EOFError(f"end of file after {done} of {nbytes} bytes")
                done += count
        except (OSError, EOFError) as cause:
            return ReadOutcome(done, ReadFailure(request.offset + done, cause))
        return ReadOutcome(done)

    def _preadv_limited(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._limit is None:
            return self._preadv(descriptor, buffers, offset)
        began = self._limit.now()
        count = self._preadv(descriptor, buffers, offset)
        self._limit.delay(count, began)
        return count

    def _descriptor(self, path: Path) -> int:
        descriptor = self._descriptors.get(path)
        if descriptor is not None:
            return descriptor
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]


def _after(buffers: tuple[memoryview, ...], done: int) -> Sequence[memoryview]:
    """What of `buffers` is left to fill after the first `done` bytes."""
    if done == 0:
        return buffers
    left = []
    for buffer in buffers:
        if done < buffer.nbytes:
            left.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return left
