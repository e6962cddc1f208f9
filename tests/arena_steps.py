"""Small steps of an arena over `ExpertFiles`, for tests."""

import errno

import mlx.core as mx
import numpy as np

from qwisp.arena.reader import PreadReader
from qwisp.arena.requests import ReadFailure, ReadOutcome

NUM_EXPERTS = 12
LAYER = 1


class Ended:
    """A read that is over."""

    def __init__(self, outcome):
        self._outcome = outcome

    def result(self):
        return self._outcome


class Doomed:
    """Fails the reads of some experts, after overwriting half of each buffer with rubbish."""

    def __init__(self, files):
        self.experts = set()
        self.requests = []
        self._files = files
        self._reader = PreadReader(2)

    def submit(self, request):
        layer, expert = self._files.find(request.path, request.offset)
        self.requests.append((layer, expert))
        if expert not in self.experts:
            return self._reader.submit(request)
        for buffer in request.buffers:
            buffer[: buffer.nbytes // 2] = b"\xee" * (buffer.nbytes // 2)
        failure = ReadFailure(request.offset + 3, OSError(errno.EIO, "bad"))
        return Ended(ReadOutcome(3, failure))

    def close(self):
        self._reader.close()


def rows(*experts):
    """One row per pair of experts."""
    return np.array(experts, dtype=np.uint32).reshape(-1, 2)


def run(arena, routes, layer=LAYER):
    """A whole step; returns its passes."""
    passes = []
    step = arena.begin(layer, routes, kind="decode")
    for found in step:
        step.fence(mx.zeros(1))
        passes.append(found)
    return passes


def slot_bytes(arena, slot, layer=LAYER):
    return [np.array(p.view(mx.uint8))[slot].tobytes() for p in arena.bank(layer).values()]


def slow_copy_of_slots(arena, found):
    """A computation that reads the slots only after a long one on the same stream."""
    a = mx.full((512, 512), 1e-6)
    for _ in range(2):
        a = a @ a
    part = arena.bank(LAYER)["gate_proj.weight"]
    return part[mx.array(found.slots)] + a[0, 0].astype(mx.uint32)
