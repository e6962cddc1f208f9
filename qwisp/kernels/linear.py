"""Matrix products of rows with one resident matrix, each row's bits independent of the others."""

from typing import Literal

import mlx.core as mx

from qwisp.kernels.numerics import Numerics
from qwisp.kernels.weights import DenseWeight, QuantizedWeight, Weight

Phase = Literal["prefill", "decode"]
"""Prefill rows all belong to one prompt, so a call's shape depends on that prompt alone; decode
rows belong to any lanes, so every call must stay inside one kernel class."""


def linear(x: mx.array, w: Weight, numerics: Numerics, phase: Phase) -> mx.array:
    """`x @ w.T` for rows.

    x: `[rows, in]`, dtype of the weight's scales. Returns `[rows, out]`, same dtype.
    In decode a row has the same bits whatever rows are beside it; in prefill, for equal prompts.
    """
    assert x.ndim == 2, x.shape
    if isinstance(w, DenseWeight):
        return _dense(x, w, numerics, phase)
    if phase == "prefill":
        return _quantized(x, w)
    low, high = numerics.linear_rows
    num_rows = x.shape[0]
    if low <= num_rows <= high:
        return _quantized(x, w)
    if num_rows < low:
        return _quantized(mx.concatenate([x, mx.repeat(x[:1], low - num_rows, axis=0)]), w)[
            :num_rows
        ]
    return mx.concatenate([_quantized(x[a:b], w) for a, b in numerics.row_tiles(num_rows)])


def _quantized(x: mx.array, w: QuantizedWeight) -> mx.array:
    assert x.dtype == w.scales.dtype, (x.dtype, w.scales.dtype)
    return mx.quantized_matmul(
        x,
        w.weight,
        w.scales,
        w.biases,
        transpose=True,
        group_size=w.quantization.group_size,
        bits=w.quantization.bits,
        mode=w.quantization.mode,
    )


def _dense(x: mx.array, w: DenseWeight, numerics: Numerics, phase: Phase) -> mx.array:
    num_rows, limit = x.shape[0], numerics.dense_rows_max
    if phase == "prefill" or num_rows <= limit:
        return x @ w.weight.T
    return mx.concatenate([x[a : a + limit] @ w.weight.T for a in range(0, num_rows, limit)])


def embed(token_ids: mx.array, w: Weight) -> mx.array:
    """Rows of the embedding matrix. token_ids: `[rows]` int. Returns `[rows, hidden]`."""
    if isinstance(w, DenseWeight):
        return w.weight[token_ids]
    return mx.dequantize(
        w.weight[token_ids],
        w.scales[token_ids],
        w.biases[token_ids],
        group_size=w.quantization.group_size,
        bits=w.quantization.bits,
        mode=w.quantization.mode,
    )
