import errno
import os
import threading
import time

import pytest

from qwisp.arena.pread import BlockingReader
from qwisp.arena.rate_limit import RateLimit
from qwisp.arena.reader import PreadReader
from qwisp.arena.requests import ReadRequest
from qwisp.errors import ConfigError

DATA = bytes(range(256)) * 8


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "data.bin"
    file.write_bytes(DATA)
    return file


class FakeTime:
    """Time passes only when someone sleeps."""

    def __init__(self):
        self.now = 100.0
        self.sleeps = []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds


def read(reader, path, offset, *sizes):
    buffers = [bytearray(size) for size in sizes]
    request = ReadRequest(path, offset, tuple(memoryview(buffer) for buffer in buffers))
    outcome = reader.submit(request).result()
    reader.close()
    return outcome, [bytes(buffer) for buffer in buffers]


def failing(times, *, after_bytes=0, error=errno.EIO):
    """preadv that fails so many times, each time after a short read of `after_bytes`."""
    state = {"left": times, "offset": None}

    def preadv(descriptor, buffers, offset):
        if state["left"] == 0:
            return os.preadv(descriptor, buffers, offset)
        if after_bytes and state["offset"] is None:
            state["offset"] = offset
            return os.preadv(descriptor, [buffers[0][:after_bytes]], offset)
        state["left"] -= 1
        state["offset"] = None
        raise OSError(error, os.strerror(error))

    return preadv


def test_bytes_arrive_in_the_buffers_in_order(path):
    outcome, buffers = read(PreadReader(2), path, 300, 10, 1, 200)
    assert b"".join(buffers) == DATA[300:511]
    assert (outcome.bytes_transferred, outcome.failure) == (211, None)


def test_a_short_read_goes_on_where_it_stopped(path):
    def preadv(descriptor, buffers, offset):
        return os.preadv(descriptor, [buffers[0][:7]], offset)

    outcome, buffers = read(PreadReader(1, preadv=preadv), path, 5, 20, 7, 9)
    assert b"".join(buffers) == DATA[5:41]
    assert (outcome.bytes_transferred, outcome.failure) == (36, None)


def test_a_failed_read_is_tried_again_from_its_first_byte_and_counted(path):
    reader = PreadReader(1, retries=2, preadv=failing(2, after_bytes=30))
    outcome, buffers = read(reader, path, 0, 100)
    assert buffers == [DATA[:100]]
    assert (outcome.bytes_transferred, outcome.failure) == (30 + 30 + 100, None)


def test_a_read_that_fails_once_too_often_says_where_and_why(path):
    outcome, _ = read(PreadReader(1, retries=2, preadv=failing(3, after_bytes=30)), path, 50, 100)
    assert outcome.bytes_transferred == 90
    assert outcome.failure.offset == 80
    assert outcome.failure.cause.errno == errno.EIO


def test_the_end_of_the_file_is_an_error_and_not_tried_again(path):
    calls = []

    def preadv(descriptor, buffers, offset):
        calls.append(offset)
        return os.preadv(descriptor, buffers, offset)

    start = len(DATA) - 40
    outcome, _ = read(PreadReader(1, retries=2, preadv=preadv), path, start, 100)
    assert calls == [start, len(DATA)]
    assert outcome.failure.offset == len(DATA)
    assert "end of file after 40 of 100 bytes" in str(outcome.failure.cause)


def test_a_missing_file_is_an_outcome_and_not_an_exception(tmp_path):
    outcome, _ = read(PreadReader(1), tmp_path / "none", 0, 4)
    assert outcome.failure.cause.errno == errno.ENOENT


def test_each_file_is_opened_once_and_closed_by_close(path, monkeypatch):
    opened, closed, open_file, close_file = [], [], os.open, os.close

    def count_open(name, *flags):
        opened.append((name, open_file(name, *flags)))
        return opened[-1][1]

    monkeypatch.setattr(os, "open", count_open)
    monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), close_file(fd)))
    reader = PreadReader(4)
    requests = [ReadRequest(path, n, (memoryview(bytearray(9)),)) for n in range(50)]
    assert all(p.result().failure is None for p in [reader.submit(r) for r in requests])
    assert [name for name, _ in opened] == [path]
    reader.close()
    reader.close()
    assert closed == [opened[0][1]]


def test_reads_run_at_the_same_time(path):
    together = threading.Barrier(3, timeout=10)

    def preadv(descriptor, buffers, offset):
        together.wait()
        return os.preadv(descriptor, buffers, offset)

    reader = PreadReader(3, preadv=preadv)
    pending = [reader.submit(ReadRequest(path, n, (memoryview(bytearray(4)),))) for n in range(3)]
    assert [each.result().bytes_transferred for each in pending] == [4, 4, 4]
    reader.close()


def test_a_closed_reader_takes_no_read(path):
    reader = PreadReader(1)
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit(ReadRequest(path, 0, (memoryview(bytearray(4)),)))


def test_a_read_lasts_as_long_as_the_limit_says(path):
    fake = FakeTime()
    reader = BlockingReader(read_gbs_limit=1e-6, clock=fake.clock, sleep=fake.sleep)
    reader.read(ReadRequest(path, 0, (memoryview(bytearray(500)),)))
    reader.close()
    assert fake.sleeps == [pytest.approx(0.5)]


def test_the_limit_is_shared_by_reads_at_the_same_time():
    fake = FakeTime()
    limit = RateLimit(1000.0, clock=fake.clock, sleep=fake.sleeps.append)
    for _ in range(4):
        limit.delay(500, began=100.0)
    assert fake.sleeps == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_a_disk_that_was_idle_saves_nothing_up():
    fake = FakeTime()
    limit = RateLimit(1000.0, clock=fake.clock, sleep=fake.sleep)
    fake.now += 60.0
    limit.delay(500, began=limit.now())
    assert fake.sleeps == [pytest.approx(0.5)]


def test_a_read_that_was_slower_than_the_limit_is_not_delayed():
    fake = FakeTime()
    limit = RateLimit(1000.0, clock=fake.clock, sleep=fake.sleep)
    began = limit.now()
    fake.now += 2.0
    limit.delay(500, began)
    assert fake.sleeps == []


def test_many_threads_move_no_more_than_the_limit_allows(path):
    """Real threads and a real clock: the whole takes at least its time at the limit."""
    reader = PreadReader(4, 1e-4)
    start = time.monotonic()
    requests = [ReadRequest(path, 0, (memoryview(bytearray(1000)),)) for _ in range(6)]
    for pending in [reader.submit(request) for request in requests]:
        pending.result()
    assert time.monotonic() - start >= 0.06
    reader.close()


def test_a_fault_in_a_thread_is_raised_to_who_waits_and_the_thread_goes_on(path):
    def preadv(descriptor, buffers, offset):
        if offset == 13:
            raise TypeError("a fault of ours")
        return os.preadv(descriptor, buffers, offset)

    reader = PreadReader(1, preadv=preadv)
    bad, good = (
        reader.submit(ReadRequest(path, offset, (memoryview(bytearray(4)),))) for offset in (13, 14)
    )
    with pytest.raises(TypeError, match="a fault of ours"):
        bad.result()
    assert good.result().failure is None
    reader.close()


def test_an_outcome_may_be_asked_for_again(path):
    reader = PreadReader(1)
    pending = reader.submit(ReadRequest(path, 0, (memoryview(bytearray(4)),)))
    assert pending.result() is pending.result()
    reader.close()


@pytest.mark.parametrize(
    ("setting", "arguments"),
    [
        ("io_threads=0", {"io_threads": 0}),
        ("retries=-1", {"io_threads": 1, "retries": -1}),
        ("read_gbs_limit=0", {"io_threads": 1, "read_gbs_limit": 0}),
    ],
)
def test_impossible_settings_are_refused(setting, arguments):
    with pytest.raises(ConfigError, match=setting):
        PreadReader(**arguments)
