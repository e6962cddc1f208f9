"""The random tensors of a small model of one of the three families, under mlx-lm's names.

Names and shapes are written down here once more, on purpose: they come from mlx-lm's models and not
from the code under test.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt

import mlx.core as mx
import numpy as np

HEAD_DIM = 64
NUM_HEADS, NUM_KV_HEADS = 4, 2
NUM_KEY_HEADS, NUM_VALUE_HEADS = 2, 4
CONV_TAPS = 4

MIXED = ((4, 64), (8, 64), (4, 32), (8, 32))
"""(bits, group size) that modules take in turn with `mixed_bits`."""


@dataclass
class RandomModel:
    """A model in the making. The default is one GDN and one attention layer, 16 experts, top-8."""

    family: str = "qwen3_5_moe"
    seed: int = 0
    layers: int = 2
    hidden: int = 128
    """A multiple of 64, as `moe_intermediate`."""
    experts: int = 16
    top_k: int = 8
    vocab: int = 512
    moe_intermediate: int = 64
    shared_intermediate: int = 64
    full_attention_interval: int = 2
    """Every such layer of a hybrid family has attention, the others GDN."""
    dense_layers: tuple[int, ...] = ()
    """Layers without experts (`mlp_only_layers`); qwen3_5_moe knows none."""
    tied: bool = False
    mixed_bits: bool = False
    """Modules take bits and group size from `MIXED` in turn; otherwise they are 4-bit, group 64.
    Routers and shared-expert gates are always 8-bit, group 64, as mlx-lm converts them."""
    quantize_resident: bool = True
    """False keeps everything but the experts dense."""
    dtype: str = "float32"
    """Of scales, norms and activations."""
    tensors: dict[str, mx.array] = field(default_factory=dict, init=False)
    quantization: dict[str, object] = field(
        default_factory=lambda: {"group_size": 64, "bits": 4, "mode": "affine"}, init=False
    )
    """The block of config.json; it names the modules that do not have the default."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self._num_modules = 0

    @property
    def is_hybrid(self) -> bool:
        return self.family != "qwen3_moe"

    @property
    def prefix(self) -> str:
        return "language_model." if self.family == "qwen3_5_moe" else ""

    @property
    def moe_layers(self) -> list[int]:
        return [layer for layer in range(self.layers) if layer not in self.dense_layers]

    def is_attention(self, layer: int) -> bool:
        return not self.is_hybrid or (layer + 1) % self.full_attention_interval == 0

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> mx.array:
        values = self.rng.normal(mean, std, shape).astype(np.float32)
        return mx.array(values).astype(getattr(mx, self.dtype))

    def matrix(self, path: str, *shape: int, gain: float = 1.0) -> None:
        """A matrix whose outputs have a standard deviation of `gain` for inputs of 1."""
        weight = self.normal(*shape, std=gain / sqrt(shape[-1]))
        if not self.quantize_resident and "switch_mlp" not in path:
            self.tensors[f"{path}.weight"] = weight
            return
        bits, group_size = self._next_quantization(path)
        parts = mx.quantize(weight, group_size, bits)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            self.tensors[f"{path}.{part}"] = array

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = self.normal(size, std=0.1, mean=1.0)

    def _next_quantization(self, path: str) -> tuple[int, int]:
        bits, group_size = MIXED[self._num_modules % len(MIXED)] if self.mixed_bits else (4, 64)
        if path.endswith(("mlp.gate", "shared_expert_gate")):
            bits, group_size = 8, 64
        self._num_modules += 1
        if (bits, group_size) != (4, 64):
            self.quantization[path] = {"group_size": group_size, "bits": bits}
        return bits, group_size


def add_resident(model: RandomModel) -> None:
    """Everything but the routed experts."""
    hidden, base = model.hidden, f"{model.prefix}model"
    # A tied head makes logits of the embeddings, so they have to be smaller.
    embed_gain = 2.0 if model.tied else sqrt(hidden)
    model.matrix(f"{base}.embed_tokens", model.vocab, hidden, gain=embed_gain)
    for layer in range(model.layers):
        path = f"{base}.layers.{layer}"
        model.norm(f"{path}.input_layernorm", hidden)
        model.norm(f"{path}.post_attention_layernorm", hidden)
        if model.is_attention(layer):
            _add_attention(model, f"{path}.self_attn")
        else:
            _add_gdn(model, f"{path}.linear_attn")
        if layer in model.dense_layers:
            _add_swiglu(model, f"{path}.mlp", 2 * model.moe_intermediate)
            continue
        model.matrix(f"{path}.mlp.gate", model.experts, hidden, gain=1.5)
        if model.is_hybrid:
            _add_swiglu(model, f"{path}.mlp.shared_expert", model.shared_intermediate)
            model.matrix(f"{path}.mlp.shared_expert_gate", 1, hidden)
    model.norm(f"{base}.norm", hidden)
    if not model.tied:
        model.matrix(f"{model.prefix}lm_head", model.vocab, hidden, gain=2.0)


def _add_swiglu(model: RandomModel, path: str, intermediate: int) -> None:
    model.matrix(f"{path}.gate_proj", intermediate, model.hidden)
    model.matrix(f"{path}.up_proj", intermediate, model.hidden)
    model.matrix(f"{path}.down_proj", model.hidden, intermediate, gain=2.0)


def _add_attention(model: RandomModel, path: str) -> None:
    q_size, kv_size = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    model.matrix(f"{path}.q_proj", q_size * (1 + model.is_hybrid), model.hidden)
    model.matrix(f"{path}.k_proj", kv_size, model.hidden)
    model.matrix(f"{path}.v_proj", kv_size, model.hidden)
    model.matrix(f"{path}.o_proj", model.hidden, q_size, gain=2.0)
    model.norm(f"{path}.q_norm", HEAD_DIM)
    model.norm(f"{path}.k_norm", HEAD_DIM)


def _add_gdn(model: RandomModel, path: str) -> None:
    key_size, value_size = NUM_KEY_HEADS * HEAD_DIM, NUM_VALUE_HEADS * HEAD_DIM
    channels = 2 * key_size + value_size
    if model.family == "qwen3_next":
        model.matrix(f"{path}.in_proj_qkvz", channels + value_size, model.hidden)
        model.matrix(f"{path}.in_proj_ba", 2 * NUM_VALUE_HEADS, model.hidden)
    else:
        model.matrix(f"{path}.in_proj_qkv", channels, model.hidden)
        model.matrix(f"{path}.in_proj_z", value_size, model.hidden)
        model.matrix(f"{path}.in_proj_b", NUM_VALUE_HEADS, model.hidden)
        model.matrix(f"{path}.in_proj_a", NUM_VALUE_HEADS, model.hidden)
    model.matrix(f"{path}.out_proj", model.hidden, value_size)
    model.tensors[f"{path}.conv1d.weight"] = model.normal(channels, CONV_TAPS, 1, std=0.5)
    # Time steps of softplus(-3 +- 1), about 0.05, make states that last for tens of tokens.
    model.tensors[f"{path}.dt_bias"] = model.normal(NUM_VALUE_HEADS, std=1.0, mean=-3.0)
    decay = model.rng.uniform(0.5, 4.0, NUM_VALUE_HEADS).astype(np.float32)
    model.tensors[f"{path}.A_log"] = mx.array(np.log(decay))
    model.norm(f"{path}.norm", HEAD_DIM)


def expert_shapes(model: RandomModel, layer: int) -> Iterator[tuple[str, int, int]]:
    """Name, outputs and inputs of the three matrices of a layer's experts."""
    path = f"{model.prefix}model.layers.{layer}.mlp.switch_mlp"
    yield f"{path}.gate_proj", model.moe_intermediate, model.hidden
    yield f"{path}.up_proj", model.moe_intermediate, model.hidden
    yield f"{path}.down_proj", model.hidden, model.moe_intermediate


def add_experts(model: RandomModel) -> None:
    """The routed experts, held in memory."""
    for layer in model.moe_layers:
        for path, out_features, in_features in expert_shapes(model, layer):
            model.matrix(path, model.experts, out_features, in_features)


def add_extra(model: RandomModel) -> None:
    """Vision and MTP tensors, which no text model uses."""
    if model.family == "qwen3_5_moe":
        model.tensors["vision_tower.blocks.0.attn.qkv.weight"] = model.normal(96, 32, std=0.1)
        model.tensors["vision_tower.patch_embed.proj.bias"] = model.normal(32, std=0.1)
    model.tensors[f"{model.prefix}mtp.fc.weight"] = model.normal(model.hidden, 64, std=0.1)
    model.tensors[f"{model.prefix}mtp.layers.0.mlp.gate.weight"] = model.normal(16, 64, std=0.1)
