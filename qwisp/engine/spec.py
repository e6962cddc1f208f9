"""The shape of a model, the same for every family: what the layers are, without any weights."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AttentionSpec:
    """Full attention with grouped K/V heads, RMS norms on queries and keys, and rotary
    positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dims: int
    """Leading dims of a head that are rotated; the rest pass through."""
    rope_theta: float
    has_output_gate: bool
    """q_proj then makes a query and a gate per head, `[num_heads, 2 * head_dim]`."""


@dataclass(frozen=True)
class GDNSpec:
    """Gated DeltaNet: a depthwise convolution, then a delta-rule recurrence per value head."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_taps: int

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return (
            2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim
        )


@dataclass(frozen=True)
class MoESpec:
    """Routed experts, top_k of num_experts per token, and at most one gated shared expert."""

    num_experts: int
    top_k: int
    norm_topk_prob: bool
    intermediate_size: int
    shared_intermediate_size: int
    """0: no shared expert."""


@dataclass(frozen=True)
class LayerSpec:
    """Which mixer and which feed-forward part a layer has."""

    mixer: Literal["attention", "gdn"]
    feed_forward: Literal["moe", "dense"]


@dataclass(frozen=True)
class ModelSpec:
    """A whole model's shape."""

    model_type: str
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    attention: AttentionSpec
    gdn: GDNSpec | None
    moe: MoESpec
    eos_token_ids: tuple[int, ...]
    """From config.json alone; generation_config.json and the tokenizer may add more."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.feed_forward == "moe")
