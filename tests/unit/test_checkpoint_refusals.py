"""A folder that cannot be used is refused by the name of the file and of the tensor."""

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from qwisp.engine.checkpoint import Checkpoint
from qwisp.engine.layout import Matrix
from qwisp.engine.model_config import read_model_config
from qwisp.engine.safetensors_header import TensorInfo
from qwisp.engine.stored_tensors import stored_matrix
from qwisp.errors import CheckpointError
from tests.synthetic import edit_config, edit_tensors, make_checkpoint
from tests.tree import ROOT

EMBEDDED = ROOT / "qwisp" / "models" / "tiny"
INDEX = "model.safetensors.index.json"
BASE = "language_model.model."


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint in one file. Tests work on copies."""
    return make_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A checkpoint in three files with an index. Tests work on copies."""
    return make_checkpoint(tmp_path_factory.mktemp("sharded"), shards=3)


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def shards(sharded, tmp_path):
    return Path(shutil.copytree(sharded, tmp_path / "shards"))


def edit_quantization(folder, **entries):
    block = json.loads((folder / "config.json").read_text())["quantization"]
    edit_config(folder, quantization={**block, **entries})


def refusal(folder):
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(folder)
    assert str(folder) in str(refused.value)
    return str(refused.value)


def test_a_folder_without_config_is_named(tmp_path):
    assert "config.json: cannot be read: No such file" in refusal(tmp_path / "nowhere")


def test_a_folder_without_weights_is_named(folder):
    (folder / "model.safetensors").unlink()
    assert f"no *.safetensors file and no {INDEX}" in refusal(folder)


def test_a_shard_that_is_missing_is_named(shards):
    (shards / "model-00002-of-00003.safetensors").unlink()
    message = refusal(shards)
    assert INDEX in message
    assert "'model-00002-of-00003.safetensors'" in message


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", 3])
def test_an_index_cannot_lead_out_of_the_folder(shards, name):
    (shards / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
    assert "must be the name of a *.safetensors file in this folder" in refusal(shards)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(shards, content):
    (shards / INDEX).write_text(content)
    assert "weight_map=" in refusal(shards)


def test_a_shard_that_lacks_what_the_index_promises_is_named(shards):
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["extra.weight"] = "model-00001-of-00003.safetensors"
    (shards / INDEX).write_text(json.dumps(index))
    assert "'extra.weight' is not in model-00001-of-00003.safetensors" in refusal(shards)


def test_a_truncated_shard_is_named(shards):
    path = shards / "model-00003-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert f"{path}: truncated: tensor " in refusal(shards)


def test_a_tensor_that_exists_twice_is_named(folder):
    shutil.copy(folder / "model.safetensors", folder / "model-copy.safetensors")
    message = refusal(folder)
    assert "exists twice" in message
    assert "model-copy.safetensors" in message


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "norm.weight",
        "layers.0.linear_attn.A_log",
        "layers.0.linear_attn.in_proj_z.biases",
        "layers.1.self_attn.q_norm.weight",
        "layers.1.mlp.shared_expert.up_proj.weight",
        "layers.1.mlp.switch_mlp.down_proj.biases",
        "layers.1.mlp.switch_mlp.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(folder, name):
    edit_tensors(folder, lambda tensors: tensors.pop(BASE + name))
    assert f"tensors are missing: {name!r}" in refusal(folder)


def test_a_missing_head_is_named(folder):
    edit_tensors(folder, lambda t: [t.pop(n) for n in list(t) if "lm_head" in n])
    assert "tensors are missing: 'lm_head.weight'" in refusal(folder)


def test_many_missing_tensors_are_counted(folder):
    edit_tensors(folder, lambda t: [t.pop(n) for n in list(t) if "layers.1" in n and "mlp" in n])
    assert "and 7 more" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["layers.1.self_attn.q_proj.bias", "layers.2.input_layernorm.weight", "foo.weight"]
)
def test_a_tensor_without_use_is_named(folder, name):
    edit_tensors(folder, lambda tensors: tensors.update({BASE + name: mx.ones((4,))}))
    assert f"leaving them out could change the model: '{BASE}{name}'" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.1.self_attn.q_proj.weight", "must be [512, 16] (4-bit, group size 64)"),
        ("layers.1.self_attn.q_proj.scales", "must be [512, 2] (4-bit, group size 64)"),
        ("layers.1.self_attn.q_proj.biases", "must be [512, 2] (4-bit, group size 64)"),
        ("layers.1.mlp.gate.weight", "must be [16, 32] (8-bit, group size 64)"),
        ("layers.1.mlp.switch_mlp.up_proj.weight", "must be [16, 64, 16] (4-bit"),
        ("layers.1.mlp.switch_mlp.down_proj.scales", "must be [16, 128, 1] (4-bit"),
        ("layers.0.linear_attn.dt_bias", "must be [4] (as config.json says)"),
        ("embed_tokens.weight", "must be [512, 16] (4-bit"),
    ],
)
def test_a_wrong_shape_is_named(folder, name, message):
    edit_tensors(folder, lambda t: t.update({BASE + name: mx.concatenate([t[BASE + name]] * 2)}))
    refused = refusal(folder)
    assert f"tensor '{BASE}{name}' in {folder / 'model.safetensors'}: its shape is" in refused
    assert message in refused


def test_a_wrong_shape_of_a_dense_matrix_is_named(tmp_path):
    folder = make_checkpoint(tmp_path, quantize_resident=False)
    name = f"{BASE}layers.0.mlp.gate.weight"
    edit_tensors(folder, lambda t: t.update({name: t[name][:, :64]}))
    assert "its shape is [16, 64], must be [16, 128] (not quantised)" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("layers.1.self_attn.q_proj.weight", mx.int32, "its type is I32, must be U32"),
        ("layers.1.self_attn.q_proj.scales", mx.uint8, "is U8, must be F32 or F16 or BF16"),
        ("layers.1.self_attn.q_proj.biases", mx.float16, "its type is F16, must be F32"),
        ("norm.weight", mx.int32, "its type is I32, must be F32 or F16 or BF16"),
    ],
)
def test_a_wrong_type_is_named(folder, name, dtype, message):
    edit_tensors(folder, lambda t: t.update({BASE + name: t[BASE + name].astype(dtype)}))
    refused = refusal(folder)
    assert f"tensor '{BASE}{name}'" in refused
    assert message in refused


def test_a_group_size_that_does_not_divide_the_inputs_is_named():
    config = read_model_config(EMBEDDED / "config.json")
    tensors = {
        f"m.{part}": TensorInfo(f"m.{part}", Path("f"), dtype, shape, 0, 0)
        for part, dtype, shape in (
            ("weight", "U32", (8, 12)),
            ("scales", "F32", (8, 1)),
            ("biases", "F32", (8, 1)),
        )
    }
    with pytest.raises(CheckpointError, match="group_size=64 does not divide its 96 inputs"):
        stored_matrix(Matrix("m", 8, 96), tensors, config)


@pytest.mark.parametrize(
    "name", ["layers.0.linear_attn.out_proj", "layers.1.mlp.switch_mlp.up_proj"]
)
def test_scales_of_two_types_are_named(folder, name):
    def cast(tensors):
        for part in ("scales", "biases"):
            tensors[f"{BASE}{name}.{part}"] = tensors[f"{BASE}{name}.{part}"].astype(mx.bfloat16)

    edit_tensors(folder, cast)
    refused = refusal(folder)
    assert f"'{BASE}{name}.scales'" in refused
    assert "is BF16, but" in refused


def test_experts_that_are_not_quantized_are_named(folder):
    name = f"{BASE}layers.1.mlp.switch_mlp.up_proj"

    def dequantize(tensors):
        tensors.pop(f"{name}.scales")
        tensors.pop(f"{name}.biases")
        tensors[f"{name}.weight"] = mx.zeros((16, 64, 128))

    edit_tensors(folder, dequantize)
    refused = refusal(folder)
    assert f"'{name}.weight'" in refused
    assert "experts that are not quantised cannot be streamed; convert" in refused


@pytest.mark.parametrize("entry", [False, None])
def test_scales_that_the_config_does_not_explain_are_named(folder, entry):
    name = f"{BASE}embed_tokens"
    if entry is None:
        edit_config(folder, quantization=None, quantization_config=None)
    else:
        edit_quantization(folder, **{name: entry})
    assert f"'{name}.scales'" in refusal(folder)
    assert "does not say how it is quantised" in refusal(folder)


def test_a_module_declared_quantized_needs_its_scales(tmp_path):
    folder = make_checkpoint(tmp_path, quantize_resident=False)
    edit_quantization(folder, **{f"{BASE}layers.0.mlp.gate": {"bits": 8, "group_size": 64}})
    refused = refusal(folder)
    assert "missing: 'layers.0.mlp.gate.biases', 'layers.0.mlp.gate.scales'" in refused


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.0.linear_attn.conv1d.weight", (512, 1, 4)),
        ("layers.0.mlp.experts.gate_up_proj", (16, 128, 128)),
        ("layers.0.mlp.experts.3.down_proj.weight", (128, 64)),
    ],
)
def test_a_checkpoint_that_was_not_converted_is_refused_with_the_way_out(folder, name, shape):
    edit_tensors(folder, lambda tensors: tensors.update({BASE + name: mx.zeros(shape)}))
    refused = refusal(folder)
    assert f"tensor '{BASE}{name}'" in refused
    assert "convert the checkpoint with mlx_lm.convert" in refused
