"""A slow disk, simulated: bytes of all threads leave through one bucket."""

import threading
import time
from collections.abc import Callable


class RateLimit:
    """A token bucket without a burst, shared by any number of threads.

    It keeps the time at which the simulated disk is free again. A read of n bytes that began at `t`
    ends at the earliest at `max(t, free) + n / rate`: never sooner than the disk alone would take,
    and later when others read at the same time. A read that really took longer is not delayed.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def now(self) -> float:
        """The time to hand to `delay()` as the beginning of a read."""
        return self._clock()

    def delay(self, nbytes: int, began: float) -> None:
        """Sleeps until the simulated disk has delivered `nbytes` of a read begun at `began`."""
        with self._lock:
            self._free_at = max(self._free_at, began) + nbytes / self._bytes_per_s
            ends = self._free_at
        remaining = ends - self._clock()
        if remaining > 0:
            self._sleep(remaining)
