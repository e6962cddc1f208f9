"""Each kernel against a plain reference, and its row independence by shape."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwisp.kernels import gdn
from qwisp.kernels.attention import rope, sdpa_decode, sdpa_prefill
from qwisp.kernels.experts import ExpertBank, combine, expert_pairs, expert_rows, place, route
from qwisp.kernels.linear import embed, linear
from qwisp.kernels.numerics import rules_for
from qwisp.kernels.weights import DenseWeight, Quantization, QuantizedWeight

CPU = rules_for("cpu", dtype="float32", prefill_chunk=64)
M3 = rules_for("metal-applegpu_g15g", dtype="float32", prefill_chunk=64)
CUDA = rules_for("cuda", dtype="float32", prefill_chunk=64)


def _random(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def _quantized(seed: int, *shape: int, bits: int = 4) -> QuantizedWeight:
    parts = mx.quantize(_random(seed, *shape) * 0.1, group_size=64, bits=bits)
    return QuantizedWeight(*parts, Quantization(bits=bits, group_size=64))


def _bytes(x: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(x)))


@pytest.mark.parametrize("numerics", [CPU, M3, CUDA])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 8, 11])
@pytest.mark.parametrize("dense", [False, True])
def test_linear_equals_the_dequantised_product(numerics, num_rows: int, dense: bool) -> None:
    w = _quantized(0, 96, 128)
    full = mx.dequantize(w.weight, w.scales, w.biases, group_size=64, bits=4)
    x = _random(1, num_rows, 128)
    # f32 sums of 128 products in another order: a few ulp of values near 1.
    np.testing.assert_allclose(
        linear(x, DenseWeight(full) if dense else w, numerics, "decode"), x @ full.T, atol=1e-5
    )


def test_embed_dequantises_the_rows_asked_for() -> None:
    w = _quantized(0, 40, 64, bits=8)
    full = mx.dequantize(w.weight, w.scales, w.biases, group_size=64, bits=8)
    ids = mx.array([3, 39, 3], dtype=mx.uint32)
    assert _bytes(embed(ids, w)) == _bytes(full[ids])
    assert _bytes(embed(ids, DenseWeight(full))) == _bytes(full[ids])


def test_route_orders_by_probability_then_by_lower_id() -> None:
    logits = mx.array([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    ids, scores = route(logits, top_k=3, norm_topk_prob=True)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    np.testing.assert_allclose(scores.sum(-1), [1.0, 1.0], rtol=1e-6)
    _, raw = route(logits, top_k=3, norm_topk_prob=False)
    np.testing.assert_allclose(raw[1], [0.2, 0.2, 0.2], rtol=1e-6)


def _bank() -> ExpertBank:
    return ExpertBank(
        _quantized(1, 6, 128, 64), _quantized(2, 6, 128, 64), _quantized(3, 6, 64, 128)
    )


@pytest.mark.parametrize("numerics", [CPU, CUDA])
def test_pairs_and_rows_compute_the_same_experts(numerics) -> None:
    bank, x = _bank(), _random(4, 5, 64)
    row_idx = mx.array([0, 1, 4, 4], dtype=mx.uint32)
    slots = mx.array([5, 2, 0, 5], dtype=mx.uint32)
    pairs = expert_pairs(x, row_idx, slots, bank, numerics)
    for i, (row, slot) in enumerate(zip(row_idx.tolist(), slots.tolist(), strict=True)):
        expected = expert_rows(x[row : row + 1], slot, bank, numerics)[0]
        np.testing.assert_allclose(pairs[i], expected, atol=1e-5)  # another summation order


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_place_undoes_any_split_into_passes(num_pairs: int, num_passes: int, random) -> None:
    values = _random(0, num_pairs, 3)
    places = list(range(num_pairs))
    random.shuffle(places)
    cuts = sorted(random.randrange(num_pairs + 1) for _ in range(num_passes - 1))
    groups = [
        np.array(places[a:b], dtype=np.int32)
        for a, b in zip([0, *cuts], [*cuts, num_pairs], strict=True)
        if a < b
    ]
    outputs = [values[mx.array(group.astype(np.uint32))] for group in groups]
    assert _bytes(place(outputs, groups)) == _bytes(values)


def test_combine_is_the_weighted_sum_in_router_order() -> None:
    placed, scores = _random(0, 6, 4), _random(1, 2, 3)
    expected = np.einsum("rkh,rk->rh", np.array(placed).reshape(2, 3, 4), np.array(scores))
    np.testing.assert_allclose(combine(placed, scores), expected, atol=1e-6)


def _attention_reference(q, k, v, position: int, scale: float) -> np.ndarray:
    q, k, v = (np.array(x, dtype=np.float64) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, axis=1), np.repeat(v, repeats, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    visible = np.arange(k.shape[0])[None] <= position + np.arange(q.shape[0])[:, None]
    scores = np.where(visible[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(("position", "tokens"), [(0, 1), (0, 70), (5, 70), (64, 64), (30, 3)])
def test_prefill_attention_is_causal_over_any_tiling(position: int, tokens: int) -> None:
    end = position + tokens
    q, k, v = _random(0, tokens, 4, 32), _random(1, end, 2, 32), _random(2, end, 2, 32)
    out = sdpa_prefill(q, k, v, position, scale=0.2, numerics=CPU)
    np.testing.assert_allclose(out, _attention_reference(q, k, v, position, 0.2), atol=2e-5)


def test_decode_attention_sees_every_key() -> None:
    q, k, v = _random(0, 1, 4, 32), _random(1, 33, 2, 32), _random(2, 33, 2, 32)
    out = sdpa_decode(q, k, v, scale=0.2)
    np.testing.assert_allclose(out, _attention_reference(q, k, v, 32, 0.2), atol=2e-5)


def test_rope_of_a_chunk_equals_rope_token_by_token() -> None:
    x = _random(0, 9, 3, 32)
    whole = rope(x, 100, dims=8, base=1e4)
    parts = [rope(x[i : i + 1], 100 + i, dims=8, base=1e4) for i in range(9)]
    assert _bytes(whole) == _bytes(mx.concatenate(parts))
    assert _bytes(whole[..., 8:]) == _bytes(x[..., 8:])


def _delta_reference(q, k, v, g, beta, state):
    q, k, v, g, beta, state = (np.array(x, dtype=np.float64) for x in (q, k, v, g, beta, state))
    repeats = v.shape[1] // k.shape[1]
    q, k = np.repeat(q, repeats, axis=1), np.repeat(k, repeats, axis=1)
    outputs = []
    for t in range(len(q)):
        state = state * g[t][:, None, None]
        error = (v[t] - np.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + np.einsum("hv,hk->hvk", error, k[t])
        outputs.append(np.einsum("hvk,hk->hv", state, q[t]))
    return np.stack(outputs), state


def test_delta_rule_follows_its_definition_and_does_not_depend_on_chunking() -> None:
    q, k = gdn.normalize_qk(_random(0, 12, 2, 16), _random(1, 12, 2, 16))
    v, state = _random(2, 12, 4, 8), _random(3, 4, 8, 16)
    g, beta = mx.sigmoid(_random(4, 12, 4)), mx.sigmoid(_random(5, 12, 4))
    out, end = gdn.delta_rule(q, k, v, g, beta, state)
    expected, expected_end = _delta_reference(q, k, v, g, beta, state)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(end, expected_end, atol=1e-5)
    first, middle = gdn.delta_rule(q[:5], k[:5], v[:5], g[:5], beta[:5], state)
    second, again = gdn.delta_rule(q[5:], k[5:], v[5:], g[5:], beta[5:], middle)
    assert _bytes(mx.concatenate([first, second])) == _bytes(out)
    assert _bytes(again) == _bytes(end)


def test_convolution_carries_its_history_over_any_cut() -> None:
    x, history, weight = _random(0, 10, 6), _random(1, 3, 6), _random(2, 4, 6)
    out, end = gdn.causal_conv(x, history, weight)
    window = np.concatenate([np.array(history), np.array(x)])
    raw = sum(window[i : i + 10] * np.array(weight[i]) for i in range(4))
    np.testing.assert_allclose(out, raw / (1 + np.exp(-raw)), atol=1e-5)
    assert _bytes(end) == _bytes(x[-3:])
    for cut in (1, 2, 7):
        head, middle = gdn.causal_conv(x[:cut], history, weight)
        tail, last = gdn.causal_conv(x[cut:], middle, weight)
        assert _bytes(mx.concatenate([head, tail])) == _bytes(out)
        assert _bytes(last) == _bytes(end)
