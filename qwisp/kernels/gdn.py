"""Gated DeltaNet: depthwise causal convolution with history, and the gated delta-rule recurrence.

Both run token by token, in the same operations for one token as for many, so prefill and decode
agree. The recurrence is that of Yang et al., "Gated Delta Networks" (arXiv 2412.06464), with the
state in f32.
"""

import mlx.core as mx

from qwisp.kernels.compiled import compiled
from qwisp.kernels.elementwise import silu

L2_EPS = 1e-6

SEGMENT_TOKENS = 64
"""Tokens of the recurrence that are described before they are submitted: 64 states in memory at
most."""


def causal_conv(x: mx.array, history: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """Depthwise causal convolution of one lane's consecutive tokens, then SiLU.

    x: `[tokens, channels]`. history: the `taps - 1` inputs before them, oldest first. weight:
    `[taps, channels]`, oldest tap first. Returns `[tokens, channels]` and the new history, which
    shares no memory with its inputs. Written as a sum over taps: library convolutions pick kernels
    by shape.
    """
    # Compiled for the one token of a decode step only: MLX keeps what it compiled for each shape.
    return (_one_token_conv if x.shape[0] == 1 else _conv)(x, history, weight)


def _conv(x: mx.array, history: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    taps, num_tokens = weight.shape[0], x.shape[0]
    window = mx.concatenate([history, x])
    total = window[:num_tokens] * weight[0]
    for tap in range(1, taps):
        total = total + window[tap : tap + num_tokens] * weight[tap]
    return silu(total), mx.contiguous(window[num_tokens:])


_one_token_conv = compiled()(_conv)


def normalize_qk(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    """L2-normalised queries and keys, `[..., head_dim]`; the queries also carry `head_dim ** -0.5`.

    q, k: `[tokens, heads, head_dim]`.
    """
    return (_one_token_qk if q.shape[0] == 1 else _qk)(q, k)


def _qk(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    scale = q.shape[-1] ** -0.5
    # The reference adds its epsilon to the sum of squares; `rms_norm` adds to their mean.
    mean_eps = L2_EPS * scale * scale
    return (
        (scale * scale) * mx.fast.rms_norm(q, None, mean_eps),
        scale * mx.fast.rms_norm(k, None, mean_eps),
    )


_one_token_qk = compiled()(_qk)


@compiled(shapeless=True)
def decay(a: mx.array, a_log: mx.array, dt_bias: mx.array) -> mx.array:
    """How much of the state survives each token: `exp(-exp(a_log) * softplus(a + dt_bias))`.

    a: `[tokens, value_heads]`; a_log: f32. Returns f32 `[tokens, value_heads]`.
    """
    return mx.exp(-mx.exp(a_log) * mx.logaddexp(a.astype(mx.float32) + dt_bias, 0.0))


def delta_rule(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The recurrence over one lane's consecutive tokens.

    q, k: `[tokens, key_heads, key_dim]`. v: `[tokens, value_heads, value_dim]`. g (decay), beta:
    `[tokens, value_heads]`. state: f32 `[value_heads, value_dim, key_dim]`. Returns the outputs,
    `[tokens, value_heads, value_dim]` in the dtype of q, and the state after the last token.
    """
    assert state.dtype == mx.float32, state.dtype
    repeats = v.shape[1] // k.shape[1]
    if repeats > 1:
        q, k = mx.repeat(q, repeats, axis=1), mx.repeat(k, repeats, axis=1)
    segments = []
    for start in range(0, q.shape[0], SEGMENT_TOKENS):
        rows = slice(start, start + SEGMENT_TOKENS)
        out, state = _delta_segment(q[rows], k[rows], v[rows], g[rows], beta[rows], state)
        if q.shape[0] > SEGMENT_TOKENS:
            # Each unevaluated token holds a state of its own, so a long chunk is submitted in
            # parts.
            mx.async_eval(out, state)
        segments.append(out)
    return (segments[0] if len(segments) == 1 else mx.concatenate(segments)), state


def _delta_segment(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    outputs = []
    for t in range(q.shape[0]):
        # A slice of one token is a view, where an integer index would gather a copy.
        q_t, k_t, v_t, g_t, beta_t = (x[t : t + 1] for x in (q, k, v, g, beta))
        y, state = _delta_step(q_t, k_t, v_t, g_t, beta_t, state)
        outputs.append(y)
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).astype(q.dtype), state


@compiled()
def _delta_step(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One token: q, k `[1, value_heads, key_dim]`, v `[1, value_heads, value_dim]`, g, beta `[1,
    value_heads]`."""
    heads, value_dim, key_dim = state.shape
    key = k.reshape(heads, 1, key_dim)
    decayed = state * g.reshape(heads, 1, 1)
    recalled = (decayed * key).sum(axis=-1, keepdims=True)
    written = (v.reshape(heads, value_dim, 1) - recalled) * beta.reshape(heads, 1, 1)
    state = decayed + key * written
    return (state * q.reshape(heads, 1, key_dim)).sum(axis=-1)[None], state
