"""The decoder layer on rows: a mixer on each lane's own state, then the feed-forward part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from qwisp.engine.spec import AttentionSpec, GDNSpec, ModelSpec
from qwisp.engine.weights import AttentionWeights, GDNWeights, LayerWeights, SwiGLUWeights
from qwisp.kernels import gdn
from qwisp.kernels.attention import rope, sdpa_decode, sdpa_prefill
from qwisp.kernels.elementwise import sigmoid_gate, silu_gate_f32, swiglu
from qwisp.kernels.linear import Phase, linear
from qwisp.kernels.numerics import Numerics
from qwisp.kernels.weights import Weight
from qwisp.lanes.state import GDNState, KVArena, LaneState


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Which rows of a call belong to which lane.

    In decode each lane has one row; in prefill there is one lane, with a chunk of consecutive
    tokens.
    """

    phase: Phase
    states: tuple[LaneState, ...]
    num_rows: int

    def __post_init__(self) -> None:
        if self.phase == "decode":
            assert self.num_rows == len(self.states), (self.num_rows, len(self.states))
        else:
            assert len(self.states) == 1, len(self.states)

    def rows_of(self, lane_idx: int) -> slice:
        """Half-open row range of a lane."""
        if self.phase == "decode":
            return slice(lane_idx, lane_idx + 1)
        return slice(0, self.num_rows)


@dataclass(frozen=True, slots=True)
class RowMath:
    """Row-exact products of one call of the model: its rules and its phase filled in."""

    numerics: Numerics
    phase: Phase
    unseen_routes: list[tuple[int, mx.array]] = field(default_factory=list)
    """Layer and routed ids, `[rows, top_k]`, of the layers that did not need the host to know them;
    to be accounted for once the call has been evaluated."""

    def linear(self, x: mx.array, w: Weight) -> mx.array:
        """`x @ w.T`, `[rows, in]` to `[rows, out]`."""
        return linear(x, w, self.numerics, self.phase)

    def swiglu(self, x: mx.array, w: SwiGLUWeights) -> mx.array:
        """A dense feed-forward part, `[rows, hidden]` to the same."""
        return self.linear(
            swiglu(self.linear(x, w.gate_proj), self.linear(x, w.up_proj)), w.down_proj
        )


FeedForward = Callable[[mx.array, RowMath], mx.array]
"""The feed-forward part of a layer: `[rows, hidden]` to the same. Experts may come from disk."""


def decoder_layer(
    x: mx.array,
    index: int,
    w: LayerWeights,
    spec: ModelSpec,
    batch: RowBatch,
    math: RowMath,
    feed_forward: FeedForward | None,
) -> mx.array:
    """One layer, advancing every lane's state.

    x: `[rows, hidden]`. `feed_forward` None: the output is not needed, only the states are (the
    last layer of a prefill); the value returned is then only good for being dropped.
    """
    normed = mx.fast.rms_norm(x, w.input_norm, spec.rms_norm_eps)
    states = [state.layers[index] for state in batch.states]
    if isinstance(w.mixer, AttentionWeights):
        mixed = _attention(normed, w.mixer, spec, batch, math, states)
    else:
        mixed = _gated_delta_net(normed, w.mixer, spec, batch, math, states)
    if feed_forward is None:
        return mixed
    x = x + mixed
    normed = mx.fast.rms_norm(x, w.post_attention_norm, spec.rms_norm_eps)
    return x + feed_forward(normed, math)


def _attention(
    x: mx.array,
    w: AttentionWeights,
    model: ModelSpec,
    batch: RowBatch,
    math: RowMath,
    states: Sequence[KVArena | GDNState],
) -> mx.array:
    spec = model.attention
    num_rows = x.shape[0]
    q = math.linear(x, w.q_proj).reshape(num_rows, spec.num_heads, -1)
    gate = None
    if spec.has_output_gate:
        q, gate = mx.split(q, 2, axis=-1)
    k = math.linear(x, w.k_proj).reshape(num_rows, spec.num_kv_heads, spec.head_dim)
    v = math.linear(x, w.v_proj).reshape(num_rows, spec.num_kv_heads, spec.head_dim)
    q = mx.fast.rms_norm(q, w.q_norm, model.rms_norm_eps)
    k = mx.fast.rms_norm(k, w.k_norm, model.rms_norm_eps)
    outputs = []
    for lane_idx, kv in enumerate(states):
        assert isinstance(kv, KVArena)
        rows = batch.rows_of(lane_idx)
        outputs.append(_attend(q[rows], k[rows], v[rows], kv, spec, math))
    out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    out = out.reshape(num_rows, -1)
    if gate is not None:
        out = sigmoid_gate(out, gate.reshape(num_rows, -1))
    return math.linear(out, w.o_proj)


def _attend(
    q: mx.array, k: mx.array, v: mx.array, kv: KVArena, spec: AttentionSpec, math: RowMath
) -> mx.array:
    """One lane's rows: rotate, append to its keys and values, attend."""
    position = kv.length
    q = rope(q, position, dims=spec.rotary_dims, base=spec.rope_theta)
    k = rope(k, position, dims=spec.rotary_dims, base=spec.rope_theta)
    keys, values = kv.append(k, v)
    scale = spec.head_dim**-0.5
    if math.phase == "decode":
        return sdpa_decode(q, keys, values, scale=scale)
    return sdpa_prefill(q, keys, values, position, scale=scale, numerics=math.numerics)


def _gated_delta_net(
    x: mx.array,
    w: GDNWeights,
    model: ModelSpec,
    batch: RowBatch,
    math: RowMath,
    states: Sequence[KVArena | GDNState],
) -> mx.array:
    spec = model.gdn
    assert spec is not None
    num_rows = x.shape[0]
    qkv = math.linear(x, w.in_proj_qkv)
    z = math.linear(x, w.in_proj_z).reshape(num_rows, spec.num_value_heads, spec.value_head_dim)
    beta = mx.sigmoid(math.linear(x, w.in_proj_b))
    g = gdn.decay(math.linear(x, w.in_proj_a), w.a_log, w.dt_bias)
    if math.phase == "prefill":
        # The recurrence takes the host long to describe; the device works on the projections
        # meanwhile.
        mx.async_eval(qkv, z, beta, g)
    outputs = []
    for lane_idx, state in enumerate(states):
        assert isinstance(state, GDNState)
        rows = batch.rows_of(lane_idx)
        outputs.append(_recur(qkv[rows], g[rows], beta[rows], w, spec, state))
    out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    out = silu_gate_f32(mx.fast.rms_norm(out, w.norm, model.rms_norm_eps), z)
    return math.linear(out.reshape(num_rows, -1), w.out_proj)


def _recur(
    qkv: mx.array, g: mx.array, beta: mx.array, w: GDNWeights, spec: GDNSpec, state: GDNState
) -> mx.array:
    """One lane's rows: convolve with its history, then the delta rule on its state."""
    mixed, conv = gdn.causal_conv(qkv, state.conv, w.conv)
    key_dim = spec.num_key_heads * spec.key_head_dim
    q, k, v = mx.split(mixed, [key_dim, 2 * key_dim], axis=-1)
    q = q.reshape(-1, spec.num_key_heads, spec.key_head_dim)
    k = k.reshape(-1, spec.num_key_heads, spec.key_head_dim)
    v = v.reshape(-1, spec.num_value_heads, spec.value_head_dim)
    q, k = gdn.normalize_qk(q, k)
    out, recurrence = gdn.delta_rule(q, k, v, g, beta, state.recurrence)
    state.advance(conv, recurrence)
    return out
