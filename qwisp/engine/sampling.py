"""Chooses the next token of a row of logits. Knows no tokens' meaning and no lanes."""

import mlx.core as mx

from qwisp.config import SamplingParams

_SMALLEST_NORMAL = 2.0**-126
"""The least temperature in f32: below it a division could give 0 / 0."""


class Sampler:
    """Chooses the tokens of one request.

    Each sampler has its own chain of keys, begun from the request's seed: what it draws depends on
    the seed, on how many tokens it drew before, and on the logits, never on other samplers or on
    MLX's global generator. Make and use it on the thread that computes.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._key = mx.random.key(params.seed)

    def next(self, logits_row: mx.array) -> mx.array:
        """The next token id, a uint32 scalar that is not evaluated yet.

        logits_row: [vocab_size], of any float type.

        Greedy takes the largest logit, of equal ones the lowest id. Otherwise it draws from the
        softmax of `filter_logits`. A row with a NaN or +inf, or without any finite value, gives an
        id in range that means nothing: the caller must refuse a row unless `mx.max` of it, which
        is NaN if any value is, is finite.
        """
        assert logits_row.ndim == 1
        if self._params.is_greedy:
            return mx.argmax(logits_row)
        keys = mx.random.split(self._key)
        self._key = keys[0]
        return mx.random.categorical(filter_logits(logits_row, self._params), key=keys[1])


def filter_logits(logits_row: mx.array, params: SamplingParams) -> mx.array:
    """The logits to draw from: divided by the temperature, -inf where a filter drops the token.

    logits_row: [vocab_size], of any float type. Result: [vocab_size] f32, shifted so that the
    largest is 0.

    The order is temperature, top_k, top_p, min_p, as in Hugging Face transformers; each acts on
    what the one before left. At least one token stays. Where top_k or top_p must choose between
    equally likely tokens, the lower ids stay; min_p treats equally likely tokens alike.
    """
    logits = logits_row.astype(mx.float32)
    # Shifted before it is divided: large logits over a small temperature would all become inf.
    logits = (logits - mx.max(logits)) / max(params.temperature, _SMALLEST_NORMAL)
    top_k = min(params.top_k or logits.size, logits.size)
    if top_k < logits.size or params.top_p < 1.0:
        logits = _keep_likeliest(logits, top_k, params.top_p)
    if params.min_p > 0.0:
        logits = mx.where(mx.exp(logits) >= params.min_p, logits, -mx.inf)
    return logits


def _keep_likeliest(logits: mx.array, top_k: int, top_p: float) -> mx.array:
    candidates = logits if top_k == logits.size else mx.topk(logits, top_k)
    if top_p == 1.0:
        return _keep(logits, mx.min(candidates), mx.array(top_k))
    descending = mx.sort(candidates)[::-1]
    num_kept = _nucleus_size(descending, top_p)
    return _keep(logits, descending[num_kept - 1], num_kept)


def _nucleus_size(descending: mx.array, top_p: float) -> mx.array:
    """How many of the likeliest tokens it takes to have at least top_p of their mass together."""
    mass = mx.exp(descending)
    mass_before = mx.cumsum(mass, inclusive=False)
    total = mass_before[-1] + mass[-1]
    # A top_p that is 0 in f32 would keep nothing.
    return mx.maximum(mx.sum(mass_before < top_p * total), 1)


def _keep(logits: mx.array, least: mx.array, num_kept: mx.array) -> mx.array:
    """Drop all but num_kept tokens, the least of which has the logit `least`.

    By value and count, not by an argsort: whether that keeps the order of ties differs by backend.
    """
    above = logits > least
    tied = logits == least
    num_tied_kept = num_kept - mx.sum(above)
    kept = above | (tied & (mx.cumsum(tied.astype(mx.int32)) <= num_tied_kept))
    return mx.where(kept, logits, -mx.inf)
