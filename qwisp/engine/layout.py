"""Which tensors a model of a given shape consists of: names and shapes, before any quantisation.

Names are canonical: the prefixes that converters put in front (`language_model.model.`, `model.`)
are cut off, so a name starts with `embed_tokens`, `layers.N`, `norm` or `lm_head`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from qwisp.engine.spec import AttentionSpec, GDNSpec, ModelSpec

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The three matrices of a feed-forward part, in the one order used everywhere."""

_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
_SKIPPED = frozenset({"mtp", "vision_tower", "visual"})
"""Parts of a checkpoint that are not the language model: draft head and vision."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix `[out_features, in_features]`, quantised or not, under the name of its module."""

    path: str
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class Vector:
    """A tensor that is never quantised."""

    name: str
    shape: tuple[int, ...]
    is_f32: bool = False
    """Kept in f32 whatever the type of the activations."""


def canonical_name(name: str) -> str:
    """A tensor's or module's name without the prefix of the converter that wrote it."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def is_skipped(name: str) -> bool:
    """Whether a tensor, by its full name, belongs to a part that is never loaded."""
    return not _SKIPPED.isdisjoint(name.split("."))


def expert_matrices(spec: ModelSpec, layer: int) -> tuple[Matrix, ...]:
    """The matrices of one routed expert, in the order of `PROJECTIONS`. They are stored stacked."""
    return _swiglu(f"layers.{layer}.mlp.switch_mlp", spec.hidden_size, spec.moe.intermediate_size)


def resident_matrices(spec: ModelSpec, dense_intermediate_size: int) -> Iterator[Matrix]:
    """Every matrix that stays in memory.

    Args:
        spec: the model.
        dense_intermediate_size: width of the feed-forward part of layers without experts.
    """
    yield Matrix("embed_tokens", spec.vocab_size, spec.hidden_size)
    for idx, layer in enumerate(spec.layers):
        path = f"layers.{idx}"
        if layer.mixer == "gdn":
            assert spec.gdn is not None
            yield from _gdn_matrices(f"{path}.linear_attn", spec, spec.gdn)
        else:
            yield from _attention_matrices(f"{path}.self_attn", spec, spec.attention)
        if layer.feed_forward == "moe":
            yield from _moe_matrices(f"{path}.mlp", spec)
        else:
            yield from _swiglu(f"{path}.mlp", spec.hidden_size, dense_intermediate_size)
    if not spec.tie_word_embeddings:
        yield Matrix("lm_head", spec.vocab_size, spec.hidden_size)


def resident_vectors(spec: ModelSpec) -> Iterator[Vector]:
    """Every other tensor that stays in memory: norms, convolutions, decay parameters."""
    for idx, layer in enumerate(spec.layers):
        path = f"layers.{idx}"
        yield Vector(f"{path}.input_layernorm.weight", (spec.hidden_size,))
        yield Vector(f"{path}.post_attention_layernorm.weight", (spec.hidden_size,))
        if layer.mixer == "gdn":
            assert spec.gdn is not None
            yield from _gdn_vectors(f"{path}.linear_attn", spec.gdn)
        else:
            yield Vector(f"{path}.self_attn.q_norm.weight", (spec.attention.head_dim,))
            yield Vector(f"{path}.self_attn.k_norm.weight", (spec.attention.head_dim,))
    yield Vector("norm.weight", (spec.hidden_size,))


def _attention_matrices(path: str, spec: ModelSpec, attention: AttentionSpec) -> Iterator[Matrix]:
    q_size = attention.num_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    yield Matrix(f"{path}.q_proj", q_size * (1 + attention.has_output_gate), spec.hidden_size)
    yield Matrix(f"{path}.k_proj", kv_size, spec.hidden_size)
    yield Matrix(f"{path}.v_proj", kv_size, spec.hidden_size)
    yield Matrix(f"{path}.o_proj", spec.hidden_size, q_size)


def _gdn_matrices(path: str, spec: ModelSpec, gdn: GDNSpec) -> Iterator[Matrix]:
    value_size = gdn.num_value_heads * gdn.value_head_dim
    if spec.model_type == "qwen3_next":
        yield Matrix(f"{path}.in_proj_qkvz", gdn.conv_channels + value_size, spec.hidden_size)
        yield Matrix(f"{path}.in_proj_ba", 2 * gdn.num_value_heads, spec.hidden_size)
    else:
        yield Matrix(f"{path}.in_proj_qkv", gdn.conv_channels, spec.hidden_size)
        yield Matrix(f"{path}.in_proj_z", value_size, spec.hidden_size)
        yield Matrix(f"{path}.in_proj_b", gdn.num_value_heads, spec.hidden_size)
        yield Matrix(f"{path}.in_proj_a", gdn.num_value_heads, spec.hidden_size)
    yield Matrix(f"{path}.out_proj", spec.hidden_size, value_size)


def _gdn_vectors(path: str, gdn: GDNSpec) -> Iterator[Vector]:
    yield Vector(f"{path}.conv1d.weight", (gdn.conv_channels, gdn.conv_taps, 1))
    yield Vector(f"{path}.A_log", (gdn.num_value_heads,), is_f32=True)
    yield Vector(f"{path}.dt_bias", (gdn.num_value_heads,))
    yield Vector(f"{path}.norm.weight", (gdn.value_head_dim,))


def _moe_matrices(path: str, spec: ModelSpec) -> Iterator[Matrix]:
    yield Matrix(f"{path}.gate", spec.moe.num_experts, spec.hidden_size)
    if spec.moe.shared_intermediate_size > 0:
        yield from _swiglu(
            f"{path}.shared_expert", spec.hidden_size, spec.moe.shared_intermediate_size
        )
        yield Matrix(f"{path}.shared_expert_gate", 1, spec.hidden_size)


def _swiglu(path: str, hidden_size: int, intermediate_size: int) -> tuple[Matrix, ...]:
    return (
        Matrix(f"{path}.gate_proj", intermediate_size, hidden_size),
        Matrix(f"{path}.up_proj", intermediate_size, hidden_size),
        Matrix(f"{path}.down_proj", hidden_size, intermediate_size),
    )
