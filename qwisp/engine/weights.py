"""The resident weights of a model as MLX arrays: everything but the routed experts."""

from dataclasses import dataclass

import mlx.core as mx

from qwisp.kernels.weights import Weight


@dataclass(frozen=True)
class AttentionWeights:
    """Full attention. `q_norm`, `k_norm`: `[head_dim]`."""

    q_proj: Weight
    k_proj: Weight
    v_proj: Weight
    o_proj: Weight
    q_norm: mx.array
    k_norm: mx.array


@dataclass(frozen=True)
class GDNWeights:
    """Gated DeltaNet.

    `in_proj_qkv` rows are all queries, then all keys, then all values, head by head, whatever order
    the family stores them in. `conv`: `[taps, channels]`, oldest tap first. `a_log`: f32
    `[num_value_heads]`. `dt_bias`: `[num_value_heads]`. `norm`: `[value_head_dim]`.
    """

    in_proj_qkv: Weight
    in_proj_z: Weight
    in_proj_b: Weight
    in_proj_a: Weight
    out_proj: Weight
    conv: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array


@dataclass(frozen=True)
class SwiGLUWeights:
    """A dense feed-forward part: `down(silu(gate(x)) * up(x))`."""

    gate_proj: Weight
    up_proj: Weight
    down_proj: Weight


@dataclass(frozen=True)
class MoEWeights:
    """The resident part of a mixture of experts. `shared*` are None where the family has no shared
    expert."""

    router: Weight
    shared_expert: SwiGLUWeights | None
    shared_expert_gate: Weight | None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norms: `[hidden_size]`."""

    input_norm: mx.array
    post_attention_norm: mx.array
    mixer: AttentionWeights | GDNWeights
    feed_forward: MoEWeights | SwiGLUWeights


@dataclass(frozen=True)
class ModelWeights:
    """All resident weights. `lm_head` is `embed_tokens` where the head is tied."""

    embed_tokens: Weight
    layers: tuple[LayerWeights, ...]
    norm: mx.array
    lm_head: Weight
