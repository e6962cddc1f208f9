"""Reads a checkpoint's config.json and turns it into a `ModelSpec`; refuses what it cannot honour.

Knows no tensors. Field names are the keys of config.json. Unknown keys are ignored, since the file
is not ours, but a known key with a value that would change the model is an error.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qwisp.engine.json_object import parse_json_object, read_bounded, shown
from qwisp.engine.quantization_config import QuantizationConfig, read_quantization
from qwisp.engine.spec import AttentionSpec, GDNSpec, LayerSpec, ModelSpec, MoESpec
from qwisp.errors import CheckpointError
from qwisp.kernels.weights import Quantization

MAX_CONFIG_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Family:
    is_hybrid: bool
    """Has GDN layers, an output gate on attention, and a shared expert."""
    may_have_dense_layers: bool
    """Honours mlp_only_layers and decoder_sparse_step."""
    norm_topk_prob: bool | None = None
    """Where config.json says nothing. None: readers disagree, so it has to be there."""


_FAMILIES = {
    "qwen3_5_moe": _Family(is_hybrid=True, may_have_dense_layers=False, norm_topk_prob=True),
    "qwen3_next": _Family(is_hybrid=True, may_have_dense_layers=True),
    "qwen3_moe": _Family(is_hybrid=False, may_have_dense_layers=True),
}

_Size = Annotated[int, Field(ge=1, lt=2**31)]
_Positive = Annotated[float, Field(gt=0.0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


R = TypeVar("R", bound=_Record)
T = TypeVar("T")


class RopeParameters(_Record):
    """`rope_parameters`, or its older name `rope_scaling`: rotary positions without scaling."""

    rope_type: Literal["default"] | None = None
    type: Literal["default"] | None = None
    rope_theta: _Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0)] | None = None


class _OuterConfig(_Record):
    """What stands beside `text_config`, or beside the flat fields."""

    model_type: str
    tie_word_embeddings: bool | None = None
    eos_token_id: int | list[int] | None = None


class TextConfig(_Record):
    """The language model's part of config.json, for all families."""

    hidden_size: _Size
    vocab_size: _Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=4096)]
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: _Size | None = None
    rms_norm_eps: _Positive
    max_position_embeddings: _Size
    tie_word_embeddings: bool | None = None
    eos_token_id: int | list[int] | None = None

    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    attn_output_gate: Literal[True] = True

    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None
    rope_theta: _Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0)] | None = None

    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None
    full_attention_interval: _Size = 4
    linear_num_key_heads: _Size | None = None
    linear_num_value_heads: _Size | None = None
    linear_key_head_dim: _Size | None = None
    linear_value_head_dim: _Size | None = None
    linear_conv_kernel_dim: _Size | None = None

    num_experts: Annotated[int, Field(ge=1, le=65536)]
    num_experts_per_tok: _Size
    norm_topk_prob: bool | None = None
    moe_intermediate_size: _Size
    shared_expert_intermediate_size: _Size | None = None
    intermediate_size: _Size | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: _Size = 1

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is above "
                f"num_experts={self.num_experts}"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for "
                f"num_hidden_layers={self.num_hidden_layers}"
            )
        return self


@dataclass(frozen=True)
class ModelConfig:
    """What config.json says: the model's shape, and how its modules are quantised."""

    spec: ModelSpec
    dense_intermediate_size: int
    """Width of the feed-forward part of layers without experts; 0 where every layer has experts."""
    quantization: QuantizationConfig

    def quantization_of(self, module_path: str) -> Quantization | None:
        """How a module is declared to be quantised, None: not at all.

        Args:
            module_path: the module's name, with or without a prefix such as `model.`.

        Raises:
            CheckpointError: it is declared in a way that is not supported.
        """
        return self.quantization.of(module_path)


def read_model_config(path: Path) -> ModelConfig:
    """Reads and checks a config.json.

    Raises:
        CheckpointError: the file cannot be read, or describes a model that is not supported.
    """
    return parse_model_config(read_bounded(path, MAX_CONFIG_NBYTES), path)


def parse_model_config(content: bytes, path: Path) -> ModelConfig:
    """Checks the content of a config.json; `path` is for messages.

    Raises:
        CheckpointError: it is not JSON, or describes a model that is not supported.
    """
    raw = parse_json_object(content, str(path))
    outer = _validate(_OuterConfig, raw, "", path)
    model_type = outer.model_type.removesuffix("_text")
    if model_type not in _FAMILIES:
        raise CheckpointError(
            f"{path}: model_type={shown(outer.model_type)} is not supported; "
            f"supported: {', '.join(_FAMILIES)}"
        )
    is_nested = "text_config" in raw
    prefix, inner = ("text_config.", raw["text_config"]) if is_nested else ("", raw)
    text = _validate(TextConfig, inner, prefix, path)
    try:
        spec = _spec(model_type, outer, text)
    except ValueError as fault:
        raise CheckpointError(f"{path}: {prefix}{fault}") from None
    return ModelConfig(spec, text.intermediate_size or 0, read_quantization(raw, path))


def _validate(record: type[R], raw: object, prefix: str, path: Path) -> R:
    try:
        return record.model_validate(raw)
    except ValidationError as invalid:
        faults = []
        for fault in invalid.errors(include_url=False):
            name = (prefix + ".".join(str(part) for part in fault["loc"])).removesuffix(".")
            if fault["loc"] and fault["type"] != "missing":
                name = f"{name}={shown(fault['input'])}"
            reason = fault["msg"].removeprefix("Value error, ")
            faults.append(f"{name}: {reason}" if name else reason)
        raise CheckpointError(f"{path}: {'; '.join(faults)}") from None


def _spec(model_type: str, outer: _OuterConfig, text: TextConfig) -> ModelSpec:
    family = _FAMILIES[model_type]
    layers = _layers(text, family)
    tied = (
        outer.tie_word_embeddings if text.tie_word_embeddings is None else text.tie_word_embeddings
    )
    return ModelSpec(
        model_type=model_type,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        rms_norm_eps=text.rms_norm_eps,
        tie_word_embeddings=bool(tied),
        max_position_embeddings=text.max_position_embeddings,
        layers=layers,
        attention=_attention(text, family),
        gdn=_gdn(text) if family.is_hybrid else None,
        moe=_moe(text, family),
        eos_token_ids=_eos_token_ids(outer.eos_token_id, text.eos_token_id),
    )


def _needed(name: str, value: T | None) -> T:
    if value is None:
        raise ValueError(f"{name} is missing")
    return value


def _layers(text: TextConfig, family: _Family) -> tuple[LayerSpec, ...]:
    layers = tuple(
        LayerSpec(_mixer(text, family, idx), "moe" if _has_experts(text, idx) else "dense")
        for idx in range(text.num_hidden_layers)
    )
    has_dense = any(layer.feed_forward == "dense" for layer in layers)
    if has_dense and not family.may_have_dense_layers:
        raise ValueError(
            f"mlp_only_layers={text.mlp_only_layers} and decoder_sparse_step="
            f"{text.decoder_sparse_step}: every layer of this family has experts"
        )
    if has_dense:
        _needed("intermediate_size", text.intermediate_size)
    if all(layer.feed_forward == "dense" for layer in layers):
        raise ValueError(
            f"mlp_only_layers={text.mlp_only_layers} and decoder_sparse_step="
            f"{text.decoder_sparse_step} leave no layer with experts: there is nothing to stream"
        )
    return layers


def _mixer(text: TextConfig, family: _Family, idx: int) -> Literal["attention", "gdn"]:
    if not family.is_hybrid:
        if text.layer_types is not None and "linear_attention" in text.layer_types:
            raise ValueError("layer_types: this family has full_attention layers only")
        return "attention"
    if text.layer_types is not None:
        return "attention" if text.layer_types[idx] == "full_attention" else "gdn"
    return "gdn" if (idx + 1) % text.full_attention_interval else "attention"


def _has_experts(text: TextConfig, idx: int) -> bool:
    return idx not in (text.mlp_only_layers or ()) and (idx + 1) % text.decoder_sparse_step == 0


def _attention(text: TextConfig, family: _Family) -> AttentionSpec:
    head_dim = text.head_dim
    if head_dim is None:
        head_dim, rest = divmod(text.hidden_size, text.num_attention_heads)
        if rest:
            raise ValueError(
                "head_dim is missing, and hidden_size / num_attention_heads is not whole"
            )
    nested = text.rope_parameters or RopeParameters()
    theta = _needed("rope_theta", _agreed("rope_theta", nested.rope_theta, text.rope_theta))
    factor = _agreed(
        "partial_rotary_factor", nested.partial_rotary_factor, text.partial_rotary_factor
    )
    if factor is None:
        factor = 0.25 if family.is_hybrid else 1.0
    if factor != 1.0 and not family.is_hybrid:
        raise ValueError(f"partial_rotary_factor={factor}: this family rotates whole heads (1.0)")
    rotary_dims = int(head_dim * factor)
    if rotary_dims == 0 or rotary_dims % 2:
        raise ValueError(
            f"partial_rotary_factor={factor} of head_dim={head_dim} rotates {rotary_dims} dims; "
            "it must be an even number above 0"
        )
    return AttentionSpec(
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        rotary_dims=rotary_dims,
        rope_theta=theta,
        has_output_gate=family.is_hybrid,
    )


def _agreed(name: str, nested: float | None, flat: float | None) -> float | None:
    # Readers differ in which of the two they take, so they have to agree.
    if nested is not None and flat is not None and nested != flat:
        raise ValueError(f"{name}={flat} but rope_parameters.{name}={nested}: they must be equal")
    return flat if nested is None else nested


def _gdn(text: TextConfig) -> GDNSpec:
    gdn = GDNSpec(
        num_key_heads=_needed("linear_num_key_heads", text.linear_num_key_heads),
        num_value_heads=_needed("linear_num_value_heads", text.linear_num_value_heads),
        key_head_dim=_needed("linear_key_head_dim", text.linear_key_head_dim),
        value_head_dim=_needed("linear_value_head_dim", text.linear_value_head_dim),
        conv_taps=_needed("linear_conv_kernel_dim", text.linear_conv_kernel_dim),
    )
    if gdn.num_value_heads % gdn.num_key_heads:
        raise ValueError(
            f"linear_num_value_heads={gdn.num_value_heads} must be a multiple of "
            f"linear_num_key_heads={gdn.num_key_heads}"
        )
    return gdn


def _moe(text: TextConfig, family: _Family) -> MoESpec:
    shared = text.shared_expert_intermediate_size
    return MoESpec(
        num_experts=text.num_experts,
        top_k=text.num_experts_per_tok,
        norm_topk_prob=_needed(
            "norm_topk_prob",
            family.norm_topk_prob if text.norm_topk_prob is None else text.norm_topk_prob,
        ),
        intermediate_size=text.moe_intermediate_size,
        shared_intermediate_size=(
            _needed("shared_expert_intermediate_size", shared) if family.is_hybrid else 0
        ),
    )


def _eos_token_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in sources:
        ids.update([source] if isinstance(source, int) else source or [])
    return tuple(sorted(ids))
