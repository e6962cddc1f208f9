"""The memory of one layer's slots: dense arrays that MLX computes from and readers write into."""

from collections.abc import Mapping
from types import MappingProxyType

import mlx.core as mx

from qwisp.arena.source import ExpertLayer


class SlotBank:
    """One dense array per tensor part, `[capacity, *part.shape]`, allocated once.

    A part's memory is a uint8 array. MLX reads it through a typed view and readers write it through
    memoryviews; both share the one buffer for the life of the bank, which never rebinds an array,
    so that no buffer can be donated or copied behind a reader's back. Who writes a slot must know
    that no unfinished computation reads it (A3).
    """

    def __init__(self, source: ExpertLayer, capacity: int) -> None:
        # An axis for the slots keeps every dimension below MLX's limit of 2**31 - 1.
        raw = [mx.zeros((capacity, part.nbytes), mx.uint8) for part in source.parts]
        typed = {
            part.name: array.view(getattr(mx, part.dtype)).reshape(capacity, *part.shape)
            for part, array in zip(source.parts, raw, strict=True)
        }
        mx.eval(raw, typed)
        self._arrays = MappingProxyType(typed)
        # MLX arrays have the buffer protocol, but their stubs do not say so.
        self._bytes = tuple(memoryview(array).cast("B") for array in raw)  # type: ignore[arg-type]
        self._part_nbytes = tuple(part.nbytes for part in source.parts)

    @property
    def arrays(self) -> Mapping[str, mx.array]:
        """Part name -> typed array. The same object, and the same arrays, at every call."""
        return self._arrays

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(view.nbytes for view in self._bytes)

    def buffers(self, slot: int) -> tuple[memoryview, ...]:
        """Writable bytes of one slot, part by part in the source's order."""
        return tuple(
            view[slot * nbytes : (slot + 1) * nbytes]
            for view, nbytes in zip(self._bytes, self._part_nbytes, strict=True)
        )
