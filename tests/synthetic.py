"""Makes small random checkpoints that mlx-lm loads too: three families, mixed bits, shards, ties.

`make_checkpoint` builds a model in memory; `make_big_checkpoint` streams many experts to the disk.
"""

import json
import shutil
from collections.abc import Callable
from math import prod, sqrt
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from tests.synthetic_tensors import (
    CONV_TAPS,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KEY_HEADS,
    NUM_KV_HEADS,
    NUM_VALUE_HEADS,
    RandomModel,
    add_experts,
    add_extra,
    add_resident,
    expert_shapes,
)

FAMILIES = ("qwen3_5_moe", "qwen3_next", "qwen3_moe")


def make_checkpoint(
    folder: Path,
    family: str = "qwen3_5_moe",
    *,
    shards: int = 1,
    with_extra_tensors: bool = False,
    tokenizer_from: Path | None = None,
    **model_fields: Any,
) -> Path:
    """Write a random checkpoint; equal arguments give equal tensors.

    Args:
        folder: created if needed, and returned.
        family: one of `FAMILIES`.
        shards: 1 writes `model.safetensors`; more write numbered files and an index.
        with_extra_tensors: adds vision and MTP tensors. mlx-lm drops them for qwen3_5_moe only.
        tokenizer_from: a model folder whose tokenizer files are copied; `vocab` has to fit.
        model_fields: fields of `RandomModel`, such as seed, layers, hidden, tied, mixed_bits.
    """
    model = RandomModel(family, **model_fields)
    add_resident(model)
    add_experts(model)
    if with_extra_tensors:
        add_extra(model)
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(folder, model)
    _write_tensors(folder, model, shards)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if tokenizer_from is not None and (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, folder / name)
    return folder


def make_big_checkpoint(
    folder: Path,
    family: str = "qwen3_5_moe",
    *,
    min_expert_nbytes: int = 500_000_000,
    seed: int = 0,
) -> Path:
    """Write a two-layer checkpoint with at least `min_expert_nbytes` of experts and little else.

    Never holds more than a few experts in memory. No two experts of a layer are equal.
    """
    model = RandomModel(family, seed=seed, hidden=1024, moe_intermediate=1024)
    # 4-bit weights and, per 64 of them, two f32: 5/8 byte per parameter.
    expert_nbytes = 3 * model.hidden * model.moe_intermediate * 5 // 8
    model.experts = -(-min_expert_nbytes // (model.layers * expert_nbytes))
    add_resident(model)
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(folder, model)
    names = _shard_names(2)
    mx.save_safetensors(str(folder / names[0]), model.tensors, {"format": "mlx"})
    streamed = _stream_experts(folder / names[1], model)
    weight_map = {**dict.fromkeys(model.tensors, names[0]), **dict.fromkeys(streamed, names[1])}
    _write_index(folder, weight_map)
    return folder


def edit_tensors(
    folder: Path,
    edit: Callable[[dict[str, mx.array]], object],
    file_name: str = "model.safetensors",
) -> None:
    """Rewrite one file of a checkpoint; `edit` changes the tensors in place."""
    tensors = mx.load(str(folder / file_name))
    edit(tensors)
    mx.eval(list(tensors.values()))
    mx.save_safetensors(str(folder / file_name), tensors, {"format": "mlx"})


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _write_config(folder: Path, model: RandomModel) -> None:
    text: dict[str, object] = {
        "hidden_size": model.hidden,
        "vocab_size": model.vocab,
        "num_hidden_layers": model.layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": model.tied,
        "attention_bias": False,
        "num_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "norm_topk_prob": True,
        "moe_intermediate_size": model.moe_intermediate,
        "intermediate_size": 2 * model.moe_intermediate,
        "mlp_only_layers": list(model.dense_layers),
        "decoder_sparse_step": 1,
    }
    if model.is_hybrid:
        text |= {
            "full_attention_interval": model.full_attention_interval,
            "linear_num_key_heads": NUM_KEY_HEADS,
            "linear_num_value_heads": NUM_VALUE_HEADS,
            "linear_key_head_dim": HEAD_DIM,
            "linear_value_head_dim": HEAD_DIM,
            "linear_conv_kernel_dim": CONV_TAPS,
            "shared_expert_intermediate_size": model.shared_intermediate,
        }
    if model.family == "qwen3_5_moe":
        rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
        text |= {"model_type": "qwen3_5_moe_text", "rope_parameters": rope}
        text = {"text_config": text}
    elif model.family == "qwen3_next":
        text |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_scaling": None}
    else:
        text |= {"rope_theta": 10000.0, "rope_scaling": None}
    config = {
        "model_type": model.family,
        "eos_token_id": [0],
        "quantization": model.quantization,
        "quantization_config": model.quantization,
        **text,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _shard_names(shards: int) -> list[str]:
    return [f"model-{idx + 1:05}-of-{shards:05}.safetensors" for idx in range(shards)]


def _write_tensors(folder: Path, model: RandomModel, shards: int) -> None:
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), model.tensors, {"format": "mlx"})
        return
    # Cut in the order of creation, so that cuts fall inside layers and inside modules.
    names = list(model.tensors)
    cuts = np.linspace(0, len(names), shards + 1).astype(int)
    weight_map: dict[str, str] = {}
    for idx, file_name in enumerate(_shard_names(shards)):
        part = {name: model.tensors[name] for name in names[cuts[idx] : cuts[idx + 1]]}
        mx.save_safetensors(str(folder / file_name), part, {"format": "mlx"})
        weight_map |= dict.fromkeys(part, file_name)
    _write_index(folder, weight_map)


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _stream_experts(path: Path, model: RandomModel) -> list[str]:
    """Write all experts expert by expert; the names written."""
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in model.moe_layers:
        for module, out_features, in_features in expert_shapes(model, layer):
            groups = (model.experts, out_features, in_features // 64)
            packed = (model.experts, out_features, in_features // 8)
            entries[f"{module}.weight"] = ("U32", packed)
            entries[f"{module}.scales"] = ("F32", groups)
            entries[f"{module}.biases"] = ("F32", groups)
    header, end = {}, 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, (_, shape) in entries.items():
            _stream_tensor(file, name, shape, model.rng)
    return list(entries)


def _stream_tensor(
    file: BinaryIO, name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    num_experts, size = shape[0], prod(shape[1:])
    # Expert e is a window that starts at e: all differ, and only one buffer is ever made.
    if name.endswith(".weight"):
        values = rng.integers(0, 2**32, size + num_experts, dtype=np.uint32)
    else:
        # Codes of 0..15 times s, minus 7.5 s: centred weights of a standard deviation near 4.6 s.
        in_features = 64 * shape[-1]
        scale = 1 / (4.6 * sqrt(in_features))
        factors = rng.uniform(0.9, 1.1, size + num_experts)
        values = (scale * factors * (1 if name.endswith(".scales") else -7.5)).astype(np.float32)
    for expert in range(num_experts):
        file.write(memoryview(values[expert : expert + size]))
