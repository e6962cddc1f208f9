"""Mixture of experts: routing, the experts' SwiGLU by pair or by expert, the combine.

An expert's output goes to its own place `[rows, top_k, hidden]` and the places are added at the end
in router order, so in how many passes the experts were computed does not matter (S1).
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from qwisp.kernels.elementwise import swiglu
from qwisp.kernels.linear import linear
from qwisp.kernels.numerics import Numerics
from qwisp.kernels.weights import QuantizedWeight


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """The experts of one layer as stacked matrices, `[slots, out, in]`."""

    gate_proj: QuantizedWeight
    up_proj: QuantizedWeight
    down_proj: QuantizedWeight


def route(
    router_logits: mx.array, *, top_k: int, norm_topk_prob: bool
) -> tuple[mx.array, mx.array]:
    """Experts of each row with their weights, most probable first.

    Equal probabilities stay in the order that MLX's sort gives them, the same for equal rows; on
    the CPU that is by lower id.

    router_logits: `[rows, num_experts]`. Returns ids, uint32 `[rows, top_k]`, and scores, `[rows,
    top_k]` in the dtype of the logits.
    """
    probabilities = mx.softmax(router_logits, axis=-1, precise=True)
    ids = mx.argsort(-probabilities, axis=-1)[:, :top_k]
    scores = mx.take_along_axis(probabilities, ids, axis=-1)
    if norm_topk_prob:
        scores = scores / scores.sum(axis=-1, keepdims=True)
    return ids, scores


def expert_pairs(
    x: mx.array, row_idx: mx.array, slots: mx.array, bank: ExpertBank, numerics: Numerics
) -> mx.array:
    """Experts on (row, expert) pairs, one row per pair, in one gathered call per projection.

    x: `[rows, hidden]`. row_idx, slots: uint32 `[pairs]`, the row and the bank slot of each pair.
    Returns `[pairs, hidden]`. Pairs are padded to `gather_pairs_min` so that every call, of one
    pass or of several, of one lane or of eight, uses the same kernel. Never sorted: that is another
    kernel.
    """
    num_pairs = row_idx.shape[0]
    padding = numerics.gather_pairs_min - num_pairs
    if padding > 0:
        row_idx = mx.concatenate([row_idx, mx.repeat(row_idx[:1], padding)])
        slots = mx.concatenate([slots, mx.repeat(slots[:1], padding)])
    rows = x[:, None, :]
    gate = _gathered(rows, row_idx, slots, bank.gate_proj)
    up = _gathered(rows, row_idx, slots, bank.up_proj)
    hidden = swiglu(gate, up)
    in_order = mx.array(np.arange(row_idx.shape[0], dtype=np.uint32))
    out = _gathered(hidden, in_order, slots, bank.down_proj)[:, 0]
    return out[:num_pairs] if padding > 0 else out


def _gathered(x: mx.array, row_idx: mx.array, slots: mx.array, w: QuantizedWeight) -> mx.array:
    assert x.dtype == w.scales.dtype, (x.dtype, w.scales.dtype)
    return mx.gather_qmm(
        x,
        w.weight,
        w.scales,
        w.biases,
        lhs_indices=row_idx,
        rhs_indices=slots,
        transpose=True,
        group_size=w.quantization.group_size,
        bits=w.quantization.bits,
        mode=w.quantization.mode,
        sorted_indices=False,
    )


def expert_rows(x: mx.array, slot: int, bank: ExpertBank, numerics: Numerics) -> mx.array:
    """One expert on all the rows of one prompt's chunk that are routed to it, in one call.

    x: `[rows, hidden]`. Returns `[rows, hidden]`. The shape depends on the prompt alone, so these
    calls are free to take whatever kernel suits the row count; the rows must never be split.
    """
    gate = linear(x, _one(bank.gate_proj, slot), numerics, "prefill")
    up = linear(x, _one(bank.up_proj, slot), numerics, "prefill")
    return linear(swiglu(gate, up), _one(bank.down_proj, slot), numerics, "prefill")


def _one(w: QuantizedWeight, slot: int) -> QuantizedWeight:
    """The matrix in one slot, without a copy: a slice shares memory where an integer index
    gathers."""
    weight, scales, biases = (
        part[slot : slot + 1].reshape(part.shape[1:]) for part in (w.weight, w.scales, w.biases)
    )
    return QuantizedWeight(weight, scales, biases, w.quantization)


def place(outputs: list[mx.array], pair_idx: list[np.ndarray]) -> mx.array:
    """Outputs of several passes at their pairs' places.

    outputs: `[pairs of the pass, hidden]` each. pair_idx: for each, the flat place `row * top_k +
    k` of its pairs; together every place once. Returns `[rows * top_k, hidden]`.
    """
    if len(outputs) == 1 and np.array_equal(pair_idx[0], np.arange(len(pair_idx[0]))):
        return outputs[0]
    order = np.concatenate(pair_idx)
    source = np.empty(len(order), dtype=np.uint32)
    source[order] = np.arange(len(order), dtype=np.uint32)
    return mx.concatenate(outputs)[mx.array(source)]


def combine(placed: mx.array, scores: mx.array) -> mx.array:
    """Weighted sum of each row's experts in router order (S1).

    placed: `[rows * top_k, hidden]`. scores: `[rows, top_k]`. Returns `[rows, hidden]`.
    """
    num_rows, top_k = scores.shape
    return (placed.reshape(num_rows, top_k, -1) * scores[..., None]).sum(axis=-2)
