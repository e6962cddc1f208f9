"""The shape of a call, as `tests/dispatch.py` wants it, from the arrays of the call."""

import math

import mlx.core as mx
import numpy as np

from tests.dispatch import Attention, Dense, Gathered, Quantized

_GROUP_SIZES = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
_BITS = {"affine": 4, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4}


def quantized_problem(x, w, transpose, group_size, bits, mode) -> Quantized:
    """The shape of a `quantized_matmul`: a 2-D weight takes all rows of x, whatever its shape."""
    bits = bits or _BITS[mode]
    k = x.shape[-1]
    if w.ndim == 2:
        rows, batch = x.size // k, 1
    else:
        rows = x.shape[-2]
        batch = num_problems(x.shape[:-2], w.shape[:-2])
    return Quantized(
        rows=rows,
        n=w.shape[-2] if transpose else w.shape[-1] * 32 // bits,
        k=k,
        bits=bits,
        group_size=group_size or _GROUP_SIZES[mode],
        mode=mode,
        batch=batch,
        transpose=transpose,
    )


def gathered_quantized_problem(
    x, w, indices, transpose, group_size, bits, mode, is_sorted
) -> Gathered:
    """The shape of a `gather_qmm`: as many problems as the two index arrays give together."""
    bits = bits or _BITS[mode]
    return Gathered(
        pairs=num_problems(*indices),
        rows=x.shape[-2],
        n=w.shape[-2] if transpose else w.shape[-1] * 32 // bits,
        k=x.shape[-1],
        num_experts=math.prod(w.shape[:-2]),
        is_sorted=is_sorted,
        bits=bits,
        group_size=group_size or _GROUP_SIZES[mode],
        mode=mode,
        transpose=transpose,
    )


def gathered_dense_problem(a, b, indices, is_sorted) -> Gathered:
    """The shape of a `gather_mm`."""
    return Gathered(
        pairs=num_problems(*indices),
        rows=a.shape[-2],
        n=b.shape[-1],
        k=a.shape[-1],
        num_experts=math.prod(b.shape[:-2]),
        is_sorted=is_sorted,
        bits=None,
    )


def dense_problem(a: mx.array, b: mx.array, *, has_bias: bool = False) -> Dense:
    """The shape of a dense product: MLX takes a's batch as rows where b has none of its own."""
    k = a.shape[-1]
    n = b.shape[-1] if b.ndim > 1 else 1
    if math.prod(b.shape[:-2]) == 1:
        return Dense(rows=a.size // k, n=n, k=k, has_bias=has_bias)
    rows = a.shape[-2] if a.ndim > 1 else 1
    batch = num_problems(a.shape[:-2], b.shape[:-2])
    return Dense(rows=rows, n=n, k=k, batch=batch, has_bias=has_bias)


def attention_problem(q: mx.array, k: mx.array, mask: str | mx.array | None) -> Attention:
    """The shape of an attention call."""
    return Attention(
        batch=q.shape[0],
        queries=q.shape[2],
        keys=k.shape[2],
        head_dim=q.shape[-1],
        heads_per_kv=q.shape[1] // k.shape[1],
        is_causal=isinstance(mask, str),
        has_array_mask=isinstance(mask, mx.array),
    )


def batch_shape(operand: mx.array, indices: mx.array | None) -> tuple[int, ...]:
    """The shape of an operand's indices, which by default count its matrices."""
    return operand.shape[:-2] if indices is None else indices.shape


def num_problems(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many problems two batch shapes make together."""
    return math.prod(np.broadcast_shapes(a, b))
