"""Full attention of rows over their own lane's keys and values, at the lane's exact length."""

import mlx.core as mx

from qwisp.kernels.numerics import Numerics


def rope(x: mx.array, position: int, *, dims: int, base: float) -> mx.array:
    """Rotary positions on the leading `dims` of each head.

    x: `[tokens, heads, head_dim]` of consecutive positions from `position` on. Same shape and dtype
    back.
    """
    turned = mx.fast.rope(
        x.transpose(1, 0, 2)[None],
        dims,
        traditional=False,
        base=base,
        scale=1.0,
        offset=position,
    )
    return turned[0].transpose(1, 0, 2)


def sdpa_decode(q: mx.array, k: mx.array, v: mx.array, *, scale: float) -> mx.array:
    """One row of a lane over all its keys.

    q: `[1, heads, head_dim]`. k, v: `[keys, kv_heads, head_dim]`, the row's own key last; they are
    never padded, since padding moves keys to other partial sums. Returns `[1, heads, head_dim]`.
    """
    assert q.shape[0] == 1, q.shape
    return _sdpa(q, k, v, scale=scale, mask=None)


def sdpa_prefill(
    q: mx.array, k: mx.array, v: mx.array, position: int, *, scale: float, numerics: Numerics
) -> mx.array:
    """Causal attention of a chunk, in query tiles that end at multiples of `attention_tile`.

    q: `[tokens, heads, head_dim]` at positions `[position, position + tokens)`. k, v:
    `[position + tokens, kv_heads, head_dim]`. A tile sees the keys up to its own end and no others,
    so its call depends on absolute positions only and its scratch is bounded by tile * keys *
    heads.
    """
    outputs = []
    start, end = position, position + q.shape[0]
    while start < end:
        stop = min(end, (start // numerics.attention_tile + 1) * numerics.attention_tile)
        tile = q[start - position : stop - position]
        mask = "causal" if stop - start > 1 else None
        outputs.append(_sdpa(tile, k[:stop], v[:stop], scale=scale, mask=mask))
        start = stop
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _sdpa(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: str | None) -> mx.array:
    heads_first = [x.transpose(1, 0, 2)[None] for x in (q, k, v)]
    out = mx.fast.scaled_dot_product_attention(*heads_first, scale=scale, mask=mask)
    return out[0].transpose(1, 0, 2)
