"""Arithmetic that depends on a kernel class: a mask that the class draws cuts a reduction in two.

`op(x * mask) + op(x * (1 - mask))` equals `op(x)` up to rounding, for finite x. On a backend whose
rows are independent a row has the same bits whatever else is in the call, and two masks give two
results.
"""

import functools
import hashlib
import threading
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from tests.dispatch import Kernel

MIN_REDUCTION = 32
"""Shorter reductions stay whole: they have too few cuts for every class to get its own."""

Halves = tuple[mx.array, mx.array]
"""A mask of ones and zeros over the reduced dimension, and its complement."""

_MAX_DRAWS = 16
# Taken before anything is patched: a part of a product must not be cut again.
_matmul = mx.matmul


class MaskBook:
    """Masks by class and length, no two of which give the same bits at the same length.

    A mask is drawn from a hash of its class, so it is the same in every process; only if two
    classes collide, which takes some 2^15 of them, does it depend on which came first. Safe to use
    from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._masks: dict[tuple[Kernel, int], np.ndarray] = {}
        self._owners: dict[tuple[int, bytes], Kernel] = {}

    def mask(self, kernel: Kernel, length: int) -> np.ndarray:
        """The mask of a class, bool `[length]`."""
        with self._lock:
            mask = self._masks.get((kernel, length))
            if mask is None:
                mask = self._masks[kernel, length] = self._draw(kernel, length)
            return mask

    def _draw(self, kernel: Kernel, length: int) -> np.ndarray:
        for attempt in range(_MAX_DRAWS):
            mask = draw(kernel, length, attempt)
            owner = self._owners.setdefault((length, fingerprint(mask)), kernel)
            if owner == kernel:
                return mask
        raise RuntimeError(f"no mask of length {length} tells {kernel} from the other classes")


@functools.cache
def mask_book() -> MaskBook:
    """The one book of the process, so that a class keeps its mask from one run to the next."""
    return MaskBook()


def draw(kernel: Kernel, length: int, attempt: int) -> np.ndarray:
    """The `attempt`-th mask that a class proposes, bool `[length]`."""
    seed = hashlib.sha256(repr((kernel, length, attempt)).encode()).digest()
    return np.random.default_rng(list(seed)).random(length) < 0.5


def fingerprint(mask: np.ndarray) -> bytes:
    """The bits of a fixed input summed by the mask; equal for a mask and its complement."""
    probe = np.random.default_rng(len(mask)).standard_normal((len(mask), 64), dtype=np.float32)
    # Row by row: numpy adds along the first axis in order.
    first = np.add.reduce(probe * mask[:, None], axis=0)
    return (first + np.add.reduce(probe * ~mask[:, None], axis=0)).tobytes()


def cut(kernel: Kernel, length: int, dtype: mx.Dtype = mx.float32) -> Halves | None:
    """The cut of a class over a reduction of `length`, or None where that is too short to cut."""
    if length < MIN_REDUCTION:
        return None
    return _halves(mask_book().mask(kernel, length), dtype)


def key_cut(kernel: Kernel, length: int) -> Halves:
    """The cut of an attention class over `length` keys: key i is dealt to partition `i % P`.

    So a sequence that is shifted by padding is cut elsewhere, unless by a multiple of P.
    """
    num_partitions = kernel[1] if kernel[0] == "sdpa_vector_2pass" else 32
    mask = mask_book().mask((*kernel, "keys"), int(num_partitions))
    return _halves(np.resize(mask, length), mx.float32)


def _halves(mask: np.ndarray, dtype: mx.Dtype) -> Halves:
    first, second = (mx.array(half.astype(np.float32)).astype(dtype) for half in (mask, ~mask))
    # Pending operations would belong to the stream of this thread.
    mx.eval(first, second)
    return first, second


def split(product: Callable[[mx.array], mx.array], x: mx.array, parts: Halves | None) -> mx.array:
    """`product(x)`, linear in x, summed over the two parts of x's last dimension."""
    if parts is None:
        return product(x)
    first, second = parts
    return product(x * first) + product(x * second)


def split_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: mx.array | None,
    features: Halves | None,
    keys: Halves,
) -> mx.array:
    """Attention whose scores are cut by `features` and whose sums over keys are cut by `keys`.

    q: `[batch, heads, queries, head_dim]`; k, v: `[batch, kv_heads, length, head_dim]`; mask: None,
    bool or additive, broadcast to `[batch, heads, queries, length]`.
    """
    batch, heads, queries, head_dim = q.shape
    kv_heads, length = k.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads * queries)
    transposed_k = k.astype(mx.float32).swapaxes(-1, -2)
    rows = (q.astype(mx.float32) * scale).reshape(*grouped, head_dim)
    scores = split(lambda part: _matmul(part, transposed_k), rows, features)
    if mask is not None:
        scores = scores.reshape(batch, heads, queries, length)
        lowest = mx.finfo(mx.float32).min
        scores = mx.where(mask, scores, lowest) if mask.dtype == mx.bool_ else scores + mask
        scores = scores.reshape(*grouped, length)
    weights = mx.exp(scores - scores.max(-1, keepdims=True))
    first, second = (weights * half for half in keys)
    values = v.astype(mx.float32)
    total = first.sum(-1, keepdims=True) + second.sum(-1, keepdims=True)
    out = (_matmul(first, values) + _matmul(second, values)) / total
    return out.reshape(batch, heads, queries, v.shape[-1]).astype(q.dtype)
