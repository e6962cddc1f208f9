"""What is loaded equals what the files hold, is as large as planned, and is nothing else."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import fields, is_dataclass

import mlx.core as mx
import numpy as np
import pytest

from qwisp.engine import resident
from qwisp.engine.checkpoint import Checkpoint
from qwisp.engine.layout import canonical_name
from qwisp.engine.resident import fused_rows, load_resident
from qwisp.engine.weights import GDNWeights
from qwisp.errors import CheckpointError
from tests.synthetic import FAMILIES, edit_tensors, make_big_checkpoint, make_checkpoint
from tests.tree import ROOT

EMBEDDED = ROOT / "qwisp" / "models" / "tiny"

FIELD_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "q_norm": "q_norm.weight",
    "k_norm": "k_norm.weight",
    "norm": "norm.weight",
    "conv": "conv1d.weight",
    "a_log": "A_log",
    "feed_forward": "mlp",
    "router": "gate",
}
"""Names of tensors and modules that differ from the names of the fields that hold them."""

VARIANTS = {
    "plain": {},
    "mixed": {"mixed_bits": True, "shards": 3, "seed": 1},
    "tied": {"tied": True, "dtype": "bfloat16"},
    "dense": {"quantize_resident": False, "dtype": "float16"},
    "deep": {"layers": 4, "full_attention_interval": 4, "with_extra_tensors": True},
}


def stored_tensors(folder):
    stored = {}
    for path in folder.glob("*.safetensors"):
        stored |= {canonical_name(name): array for name, array in mx.load(str(path)).items()}
    return stored


def loaded_tensors(value, path=""):
    """Every array of a ModelWeights with the canonical name that its place stands for."""
    if isinstance(value, mx.array):
        yield path, value
    elif isinstance(value, tuple):
        for idx, item in enumerate(value):
            yield from loaded_tensors(item, f"{path}.{idx}")
    elif is_dataclass(value):
        for field in fields(value):
            name = FIELD_NAMES.get(field.name, field.name)
            inner = getattr(value, field.name)
            if field.name == "mixer":
                name = "linear_attn" if isinstance(inner, GDNWeights) else "self_attn"
            yield from loaded_tensors(inner, f"{path}.{name}".removeprefix("."))


def raw_bytes(array):
    return memoryview(mx.contiguous(array).view(mx.uint8)).tobytes()


def assert_same_array(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert raw_bytes(found) == raw_bytes(expected)


def unique_arrays(weights):
    return {id(array): array for _, array in loaded_tensors(weights)}.values()


@pytest.fixture(
    scope="module", params=["embedded", *(f"{f} {v}" for f in FAMILIES for v in VARIANTS)]
)
def folder(request, tmp_path_factory):
    """A checkpoint that no test changes."""
    if request.param == "embedded":
        return EMBEDDED
    family, variant = request.param.split()
    return make_checkpoint(tmp_path_factory.mktemp("model"), family, **VARIANTS[variant])


def test_every_resident_tensor_is_loaded_bit_for_bit(folder):
    stored = stored_tensors(folder)
    checkpoint = Checkpoint.open(folder)
    seen = set()
    for name, array in loaded_tensors(load_resident(checkpoint)):
        if checkpoint.spec.model_type == "qwen3_next" and "linear_attn.in_proj" in name:
            continue  # tests below compare the order of the fused rows
        if checkpoint.spec.tie_word_embeddings:
            name = name.replace("lm_head", "embed_tokens")
        expected = stored[name]
        if name.endswith("conv1d.weight"):
            expected = expected[:, :, 0].T
        assert_same_array(array, expected)
        seen.add(name)
    left_out = {name for name in stored if name not in seen}
    allowed = ("switch_mlp", "in_proj_", "mtp.", "vision_tower")
    assert all(any(part in name for part in allowed) for name in left_out), left_out


def test_the_planned_bytes_are_exactly_those_held(folder):
    checkpoint = Checkpoint.open(folder)
    gc.collect()
    before = mx.get_active_memory()
    weights = load_resident(checkpoint)
    gc.collect()
    assert sum(array.nbytes for array in unique_arrays(weights)) == checkpoint.resident_nbytes
    # The sum above is exact; engines of earlier tests may still come and go by some kilobytes.
    assert abs(mx.get_active_memory() - before - checkpoint.resident_nbytes) < 1 << 16


def test_at_most_one_tensor_is_held_twice_while_loading(folder):
    checkpoint = Checkpoint.open(folder)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    weights = load_resident(checkpoint)
    peak = mx.get_peak_memory() - before
    largest = max(array.nbytes for array in unique_arrays(weights))
    assert checkpoint.resident_nbytes <= peak <= checkpoint.resident_nbytes + largest + 1024


def expert_ranges(checkpoint):
    return [
        (part.path, part.offset, part.offset + layer.num_experts * part.nbytes)
        for layer in checkpoint.expert_layers
        for part in layer.parts
    ]


def test_no_byte_of_an_expert_is_read(folder, monkeypatch):
    checkpoint = Checkpoint.open(folder)
    reads = []
    preadv, open_file, paths = os.preadv, os.open, {}

    def recording_open(path, *args):
        fd = open_file(path, *args)
        paths[fd] = path
        return fd

    def recording_preadv(fd, buffers, offset):
        nbytes = preadv(fd, buffers, offset)
        reads.append((paths[fd], offset, offset + nbytes))
        return nbytes

    monkeypatch.setattr(resident.os, "open", recording_open)
    monkeypatch.setattr(resident.os, "preadv", recording_preadv)
    load_resident(checkpoint)

    ranges = expert_ranges(checkpoint)
    for path, begin, end in reads:
        assert not any(path == p and begin < e and b < end for p, b, e in ranges)
    stored = sum(t.nbytes for m in checkpoint.matrices.values() for t in m.tensors)
    stored += sum(t.nbytes for t in checkpoint.vectors.values())
    assert sum(end - begin for _, begin, end in reads) == stored


def fixed_order(x, spec):
    """mlx-lm's own order of a row of in_proj_qkvz and in_proj_ba."""
    from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

    class Heads:
        num_k_heads, head_k_dim = spec.num_key_heads, spec.key_head_dim
        num_v_heads, head_v_dim = spec.num_value_heads, spec.value_head_dim

    q, k, v, z, b, a = Qwen3NextGatedDeltaNet.fix_query_key_value_ordering(Heads, *x)
    qkv = mx.concatenate([part.reshape(*part.shape[:2], -1) for part in (q, k, v)], axis=-1)
    return qkv, z.reshape(*z.shape[:2], -1), b, a


@pytest.mark.parametrize("variant", ["plain", "mixed", "dense"])
def test_fused_projections_give_what_mlx_lm_makes_of_them(tmp_path, variant):
    folder = make_checkpoint(tmp_path, "qwen3_next", **{**VARIANTS[variant], "dtype": "float32"})
    stored = stored_tensors(folder)
    checkpoint = Checkpoint.open(folder)
    mixer = load_resident(checkpoint).layers[0].mixer
    x = mx.array(np.random.default_rng(0).normal(size=(1, 5, 128)).astype(np.float32))

    def project(tensors, quantization):
        if quantization is None:
            return x @ tensors[0].T
        return mx.quantized_matmul(
            x, *tensors, group_size=quantization.group_size, bits=quantization.bits
        )

    def fused(name):
        path = f"layers.0.linear_attn.{name}"
        parts = [f"{path}.{p}" for p in ("weight", "scales", "biases")]
        return project(
            [stored[p] for p in parts if p in stored], checkpoint.matrices[path].quantization
        )

    expected = fixed_order((fused("in_proj_qkvz"), fused("in_proj_ba")), checkpoint.spec.gdn)
    for found, theirs in zip(
        (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a),
        expected,
        strict=True,
    ):
        if variant == "dense":
            assert_same_array(project([found.weight], None), theirs)
        else:
            ours = project([found.weight, found.scales, found.biases], found.quantization)
            assert_same_array(ours, theirs)


def test_fused_rows_are_each_taken_once(tmp_path):
    gdn = Checkpoint.open(make_checkpoint(tmp_path, "qwen3_next")).spec.gdn
    rows = fused_rows(gdn)
    for parts, num_rows in (("qkv", "z"), gdn.conv_channels + 256), (("b", "a"), 8):
        taken = [row for part in parts for run in rows[part] for row in run]
        assert sorted(taken) == list(range(num_rows))


@pytest.mark.parametrize("stored_dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_unquantized_tensors_take_the_type_of_the_activations(tmp_path, stored_dtype):
    folder = make_checkpoint(tmp_path, quantize_resident=False, dtype="bfloat16")
    edit_tensors(
        folder,
        lambda t: t.update(
            {n: a.astype(stored_dtype) for n, a in t.items() if "switch_mlp" not in n}
        ),
    )
    stored = stored_tensors(folder)
    checkpoint = Checkpoint.open(folder)
    weights = load_resident(checkpoint)
    assert checkpoint.dtype == "bfloat16"
    for name, array in loaded_tensors(weights):
        expected = stored[name][:, :, 0].T if "conv1d" in name else stored[name]
        expected = expected.astype(mx.float32 if name.endswith("A_log") else mx.bfloat16)
        assert_same_array(array, expected)
    assert sum(a.nbytes for a in unique_arrays(weights)) == checkpoint.resident_nbytes


def test_a_tied_head_is_the_embedding_itself(tmp_path):
    weights = load_resident(Checkpoint.open(make_checkpoint(tmp_path, tied=True)))
    assert weights.lm_head is weights.embed_tokens


def test_weights_can_be_used_on_another_thread():
    weights = load_resident(Checkpoint.open(EMBEDDED))
    sums = []
    thread = threading.Thread(target=lambda: sums.append(weights.norm.sum().item()))
    thread.start()
    thread.join()
    assert sums == [weights.norm.sum().item()]


def test_progress_grows_to_the_total():
    calls = []
    load_resident(Checkpoint.open(EMBEDDED), lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(set(done))
    assert {total for _, total in calls} == {done[-1]}


@pytest.mark.parametrize("how", ["cut", "removed"])
def test_a_file_that_changes_after_it_was_opened_is_named(tmp_path, how):
    folder = make_checkpoint(tmp_path)
    checkpoint = Checkpoint.open(folder)
    path = folder / "model.safetensors"
    if how == "cut":
        os.truncate(path, 20_000)
    else:
        path.unlink()
    message = "became shorter" if how == "cut" else "cannot be read: No such file"
    with pytest.raises(CheckpointError, match=rf"tensor '\S+' in {path}.*{message}"):
        load_resident(checkpoint)


def test_short_reads_are_completed(monkeypatch):
    checkpoint = Checkpoint.open(EMBEDDED)
    whole = [raw_bytes(a) for a in unique_arrays(load_resident(checkpoint))]
    preadv = os.preadv
    monkeypatch.setattr(
        resident.os, "preadv", lambda fd, b, offset: preadv(fd, [b[0][:100_000]], offset)
    )
    assert [raw_bytes(a) for a in unique_arrays(load_resident(checkpoint))] == whole


LOAD = """
import json, sys
from pathlib import Path
from qwisp.engine.checkpoint import Checkpoint
from qwisp.engine.resident import load_resident

def counters(file):
    lines = Path("/proc/self", file).read_text().splitlines()
    return {name: int(value.split()[0]) for name, value in (l.split(":") for l in lines)
            if name in ("VmRSS", "VmHWM", "rchar")}

load_resident(Checkpoint.open(Path(sys.argv[2])))
rss, rchar = counters("status")["VmRSS"], counters("io")["rchar"]
checkpoint = Checkpoint.open(Path(sys.argv[1]))
weights = load_resident(checkpoint)
peak, rchar = (counters("status")["VmHWM"] - rss) << 10, counters("io")["rchar"] - rchar
print(json.dumps({"peak": peak, "read": rchar, "resident": checkpoint.resident_nbytes}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_reads_and_holds_little_more_than_the_resident_weights(tmp_path):
    folder = make_big_checkpoint(tmp_path / "big", min_expert_nbytes=100_000_000)
    warm = make_checkpoint(tmp_path / "warm")
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), str(warm)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    shutil.rmtree(folder)
    seen = json.loads(run.stdout)
    slack = 4 << 20
    assert seen["peak"] < seen["resident"] + slack
    assert seen["resident"] <= seen["read"] < seen["resident"] + slack
