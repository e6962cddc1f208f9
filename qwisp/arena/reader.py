"""What an arena asks of a reader, and a reader that runs on threads.

The threads touch bytes only, never MLX.
"""

import os
import threading
from queue import SimpleQueue
from typing import Protocol

from qwisp.arena.pread import BlockingReader, Preadv
from qwisp.arena.requests import ReadOutcome, ReadRequest
from qwisp.errors import ConfigError


class PendingRead(Protocol):
    """A submitted request."""

    def result(self) -> ReadOutcome:
        """Blocks until no thread touches the request's buffers any more.

        Raises nothing for a read that failed: the outcome says so. May be called again.
        """
        ...


class Reader(Protocol):
    """Serves requests in any order, several at a time."""

    def submit(self, request: ReadRequest) -> PendingRead:
        """Starts a read and returns at once."""
        ...

    def close(self) -> None:
        """Waits for submitted reads and frees what the reader holds."""
        ...


class PreadReader:
    """Reads with `os.preadv` on a few threads, straight into the buffers.

    How a single read goes, with its retries, is `BlockingReader`'s matter.
    """

    def __init__(
        self,
        io_threads: int,
        read_gbs_limit: float | None = None,
        retries: int = 2,
        *,
        preadv: Preadv = os.preadv,
    ) -> None:
        """Starts the threads.

        Args:
            io_threads: Reads in flight at a time.
            read_gbs_limit: Simulates a disk of this many GB/s (1e9 bytes); None: no limit.
            retries: Further attempts after an `OSError`.
            preadv: The system call; tests inject faults here.

        Raises:
            ConfigError: a number is out of range.
        """
        if io_threads < 1:
            raise ConfigError(f"io_threads={io_threads} is below 1")
        self._reader = BlockingReader(read_gbs_limit=read_gbs_limit, retries=retries, preadv=preadv)
        # A ThreadPoolExecutor does the same at several times the cost per read.
        self._queue: SimpleQueue[_QueuedRead | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"qwisp-read-{n}", daemon=True)
            for n in range(io_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: ReadRequest) -> PendingRead:
        """Queues a read.

        Raises:
            RuntimeError: the reader is closed.
        """
        if self._is_closed:
            raise RuntimeError("the reader is closed")
        read = _QueuedRead(request)
        self._queue.put(read)
        return read

    def close(self) -> None:
        """Waits for submitted reads, ends the threads, closes the files. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._reader.close()

    def _serve(self) -> None:
        while (read := self._queue.get()) is not None:
            read.run(self._reader)


class _QueuedRead:
    """A request on its way through the queue. Locked until it is over."""

    __slots__ = ("_fault", "_is_running", "_outcome", "_request")

    def __init__(self, request: ReadRequest) -> None:
        self._request = request
        self._outcome = ReadOutcome(0)
        self._fault: BaseException | None = None
        self._is_running = threading.Lock()
        self._is_running.acquire()

    def run(self, reader: BlockingReader) -> None:
        try:
            self._outcome = reader.read(self._request)
        except BaseException as fault:
            # A fault of ours, not of the disk. Raised where someone waits: the thread goes on.
            self._fault = fault
        finally:
            self._is_running.release()

    def result(self) -> ReadOutcome:
        with self._is_running:
            if self._fault is not None:
                raise self._fault
            return self._outcome
