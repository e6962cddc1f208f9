"""The product's reader on a bad disk: short, torn, failing and out of order by a seed."""

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from qwisp.arena.pread import BlockingReader
from qwisp.arena.reader import PendingRead, PreadReader
from qwisp.arena.requests import ReadOutcome, ReadRequest


class SimReader:
    """The product's reader over injected faults.

    Args:
        seed: Decides every fault; together with the requests it decides the outcome of each.
        short: Share of system calls that move only some of the bytes.
        error: Share of system calls that overwrite some bytes with rubbish and raise EIO.
        threads: 0 runs each read on the caller's thread, in seeded order, once someone waits for
            one; above 0, so many real threads sleep a little in each call and finish in any order.
    """

    def __init__(
        self,
        seed: int,
        *,
        short: float = 0.3,
        error: float = 0.1,
        retries: int = 1,
        threads: int = 0,
    ) -> None:
        self.seen: Counter[str] = Counter()
        self.bytes_transferred = 0
        self._seed = seed
        self._short = short
        self._error = error
        self._max_sleep_s = 0.001 if threads else 0.0
        self._calls: Counter[int] = Counter()
        self._failed: list[ReadRequest] = []
        self._lock = threading.Lock()
        self._attempts = retries + 1
        self._reader: PreadReader | ShuffledReader
        if threads:
            self._reader = PreadReader(threads, retries=retries, preadv=self._preadv)
        else:
            blocking = BlockingReader(retries=retries, preadv=self._preadv)
            self._reader = ShuffledReader(blocking, random.Random(seed), self._note_order)

    def submit(self, request: ReadRequest) -> PendingRead:
        return _Watched(self, request, self._reader.submit(request))

    def close(self) -> None:
        self._reader.close()

    @property
    def num_recovered_errors(self) -> int:
        """Errors after which the same request went well."""
        return self.seen["error"] - self.seen["failure"] * self._attempts

    def take_failed(self) -> list[ReadRequest]:
        """Requests given up since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def _note_order(self, *, is_oldest: bool) -> None:
        self.seen["reorder"] += not is_oldest

    def _note_outcome(self, request: ReadRequest, outcome: ReadOutcome) -> None:
        self.bytes_transferred += outcome.bytes_transferred
        if outcome.failure is not None:
            self.seen["failure"] += 1
            self._failed.append(request)

    def _preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._calls[offset] += 1
            rng = random.Random(f"{self._seed}/{offset}/{self._calls[offset]}")
        time.sleep(rng.random() * self._max_sleep_s)
        fault, num_bytes = rng.random(), rng.randrange(1, max(2, buffers[0].nbytes))
        if fault < self._error:
            buffers[0][:num_bytes] = b"\xee" * num_bytes
            with self._lock:
                self.seen["error"] += 1
            raise OSError(errno.EIO, "simulated fault")
        if fault < self._error + self._short:
            with self._lock:
                self.seen["short"] += 1
            return os.preadv(descriptor, [buffers[0][:num_bytes]], offset)
        return os.preadv(descriptor, list(buffers), offset)


class ShuffledReader:
    """Reads nothing until someone waits, then whatever `rng` says, until that one is done."""

    def __init__(
        self, reader: BlockingReader, rng: random.Random, on_read: Callable[..., None]
    ) -> None:
        self._reader = reader
        self._rng = rng
        self._on_read = on_read
        self._queue: list[_Shuffled] = []

    def submit(self, request: ReadRequest) -> PendingRead:
        read = _Shuffled(self, request)
        self._queue.append(read)
        return read

    def close(self) -> None:
        self._reader.close()

    def read_one(self) -> None:
        index = self._rng.randrange(len(self._queue))
        self._on_read(is_oldest=index == 0)
        read = self._queue.pop(index)
        read.outcome = self._reader.read(read.request)


class _Shuffled:
    def __init__(self, reader: ShuffledReader, request: ReadRequest) -> None:
        self.request = request
        self.outcome: ReadOutcome | None = None
        self._reader = reader

    def result(self) -> ReadOutcome:
        while self.outcome is None:
            self._reader.read_one()
        return self.outcome


class _Watched:
    """Tells the reader about an outcome when it is looked at for the first time."""

    def __init__(self, reader: SimReader, request: ReadRequest, inner: PendingRead) -> None:
        self._reader = reader
        self._request = request
        self._inner = inner
        self._is_noted = False

    def result(self) -> ReadOutcome:
        outcome = self._inner.result()
        if not self._is_noted:
            self._is_noted = True
            self._reader._note_outcome(self._request, outcome)
        return outcome
