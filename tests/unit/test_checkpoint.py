"""What opens, and what a checkpoint then says about its experts and its identity."""

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from qwisp.engine.checkpoint import Checkpoint
from qwisp.kernels.weights import Quantization
from tests.synthetic import FAMILIES, edit_config, edit_tensors, make_checkpoint
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


def test_the_embedded_model_opens():
    checkpoint = Checkpoint.open(EMBEDDED)
    assert checkpoint.dtype == "float32"
    assert [layer.layer for layer in checkpoint.expert_layers] == list(range(8))
    # README.md of the model: 3 x (16,384 + 2 x 2,048) bytes.
    assert {layer.expert_nbytes for layer in checkpoint.expert_layers} == {61_440}
    assert {layer.num_experts for layer in checkpoint.expert_layers} == {64}


@pytest.mark.parametrize("folder", [EMBEDDED, "mixed"], ids=["embedded", "mixed bits"])
def test_an_expert_is_where_its_layer_says(folder, tmp_path):
    if folder == "mixed":
        folder = make_checkpoint(tmp_path, "qwen3_next", shards=3, mixed_bits=True, dtype="float16")
    stored = {}
    for path in folder.glob("*.safetensors"):
        stored |= mx.load(str(path))
    for layer in Checkpoint.open(folder).expert_layers:
        assert [part.name for part in layer.parts] == [
            f"{projection}.{tensor}"
            for projection in ("gate_proj", "up_proj", "down_proj")
            for tensor in ("weight", "scales", "biases")
        ]
        for part in layer.parts:
            suffix = f"model.layers.{layer.layer}.mlp.switch_mlp.{part.name}"
            (array,) = (array for name, array in stored.items() if name.endswith(suffix))
            assert part.shape == array.shape[1:]
            assert f"mlx.core.{part.dtype}" == str(array.dtype)
            for expert in (0, 3, layer.num_experts - 1):
                with part.path.open("rb") as file:
                    file.seek(part.offset + expert * part.nbytes)
                    assert file.read(part.nbytes) == np.array(array[expert]).tobytes()


def test_experts_are_quantized_per_layer_and_projection(tmp_path):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "qwen3_moe", mixed_bits=True))
    declared = json.loads((tmp_path / "config.json").read_text())["quantization"]
    found = set()
    for layer in (0, 1):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            entry = declared.get(f"model.layers.{layer}.mlp.switch_mlp.{projection}", declared)
            quantization = checkpoint.expert_quantization(layer, projection)
            assert quantization == Quantization(entry["bits"], entry["group_size"])
            found.add(quantization)
    assert len(found) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_vision_and_draft_tensors_are_left_out(family, tmp_path):
    plain = Checkpoint.open(make_checkpoint(tmp_path / "plain", family))
    extra = Checkpoint.open(make_checkpoint(tmp_path / "extra", family, with_extra_tensors=True))
    assert extra.resident_nbytes == plain.resident_nbytes


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_tensors_are_found_whatever_their_prefix(folder, prefix):
    before = Checkpoint.open(folder)

    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace(BASE, prefix).replace("language_model.lm", "lm")] = tensors.pop(
                name
            )

    edit_tensors(folder, rename)
    after = Checkpoint.open(folder)
    assert after.resident_nbytes == before.resident_nbytes
    assert after.matrices.keys() == before.matrices.keys()


@pytest.mark.parametrize("is_quantized", [True, False])
def test_a_tied_model_may_still_store_a_head(tmp_path, is_quantized):
    folder = make_checkpoint(tmp_path, tied=True)
    before = Checkpoint.open(folder)
    head = mx.ones((512, 128))
    parts = mx.quantize(head) if is_quantized else [head]

    def add_head(tensors):
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
            tensors[f"language_model.lm_head.{part}"] = array

    edit_tensors(folder, add_head)
    assert Checkpoint.open(folder).resident_nbytes == before.resident_nbytes


def test_a_single_file_may_have_any_name(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "._weights.safetensors").write_bytes(b"a macOS resource fork")
    Checkpoint.open(folder)


def test_shards_open_without_an_index(shards):
    indexed = Checkpoint.open(shards)
    (shards / INDEX).unlink()
    assert Checkpoint.open(shards) == indexed


def test_a_file_that_the_index_does_not_name_is_left_alone(shards):
    (shards / "model-mtp.safetensors").write_bytes(b"broken")
    Checkpoint.open(shards)


def test_opening_leaves_no_file_open(shards):
    before = len(os.listdir("/dev/fd"))
    checkpoint = Checkpoint.open(shards)
    assert len(os.listdir("/dev/fd")) == before
    assert checkpoint.expert_layers


def test_the_fingerprint_follows_the_headers_and_the_config_not_the_place_or_the_data(
    folder, tmp_path
):
    original = Checkpoint.open(folder).fingerprint
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert Checkpoint.open(copy).fingerprint == original
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert Checkpoint.open(copy).fingerprint == original
    edit_config(copy, eos_token_id=[1])
    assert Checkpoint.open(copy).fingerprint != original
    edit_tensors(folder, lambda tensors: tensors.update({"mtp.fc.weight": mx.zeros((1,))}))
    assert Checkpoint.open(folder).fingerprint != original


def test_bits_that_the_config_does_not_mention_are_read_off_the_shapes(tmp_path):
    folder = make_checkpoint(tmp_path, mixed_bits=True)
    declared = Checkpoint.open(folder)
    edit_config(folder, quantization={"group_size": 64, "bits": 4})
    inferred = Checkpoint.open(folder)
    assert inferred.matrices == declared.matrices
    assert inferred.experts == declared.experts
