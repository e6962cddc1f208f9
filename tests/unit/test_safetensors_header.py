"""A header is believed only as far as the file bears it out; every fault is a named error."""

import json
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from qwisp.engine.safetensors_header import DTYPE_BITS, parse_header, read_header
from qwisp.errors import CheckpointError

PATH = Path("model.safetensors")

NUMPY_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}

GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def encode(header: object, data_nbytes: int = 64) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_nbytes)


def read(tmp_path: Path, content: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return read_header(path)


arrays = st.tuples(
    st.sampled_from(sorted(NUMPY_NAMES)),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.integers(0, 2**32 - 1),
)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)


@given(st.dictionaries(names, arrays, max_size=6), st.booleans())
def test_what_the_safetensors_library_writes_is_read_back(described, has_metadata):
    tensors = {
        name: np.frombuffer(
            np.random.default_rng(seed).bytes(np.dtype(NUMPY_NAMES[dtype]).itemsize * size),
            NUMPY_NAMES[dtype],
        ).reshape(shape)
        for name, (dtype, shape, seed) in described.items()
        for size in [int(np.prod(shape, dtype=int))]
    }
    content = save(tensors, {"format": "mlx"} if has_metadata else None)
    length = int.from_bytes(content[:8], "little")

    found = parse_header(content[8 : 8 + length], PATH, len(content))

    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (dtype, shape) for name, (dtype, shape, _) in described.items()
    }
    for name, tensor in found.items():
        assert (tensor.name, tensor.path) == (name, PATH)
        data = content[tensor.offset : tensor.offset + tensor.nbytes]
        assert data == tensors[name].tobytes()


def test_what_mlx_writes_is_read_back(tmp_path):
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(
        str(path), {"a": mx.ones((2, 3), mx.bfloat16), "b": mx.zeros((4,), mx.uint32)}
    )
    found = read_header(path)
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in found.items()} == {
        "a": ("BF16", (2, 3), 12),
        "b": ("U32", (4,), 16),
    }


VALID = save({"a.weight": np.ones((2, 3), "f4"), "b": np.ones((5,), "u4")}, {"format": "mlx"})


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_read_or_refused_by_name(tmp_path, data):
    content = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(start + 8, len(content))))
        content[start:end] = data.draw(st.binary(max_size=8))
    try:
        found, message = read(tmp_path, bytes(content)), None
    except CheckpointError as refused:
        found, message = {}, str(refused)
    assert message is None or str(tmp_path / "model.safetensors") in message
    assert all(t.offset + t.nbytes <= len(content) for t in found.values())


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["F32", "U32", "", "dtype"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner)
    ),
    max_leaves=12,
)
near_entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(sorted(DTYPE_BITS)) | json_values,
        "shape": st.lists(st.integers(-1, 6), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 70), max_size=3) | json_values,
    },
)


@given(st.dictionaries(st.text(max_size=4), near_entries | json_values) | json_values)
@settings(max_examples=200)
def test_any_json_is_read_or_refused_by_name(header):
    text = json.dumps(header).encode()
    file_nbytes = 8 + len(text) + 64
    try:
        found, message = parse_header(text, PATH, file_nbytes), None
    except CheckpointError as refused:
        found, message = {}, str(refused)
    assert message is None or message.startswith("model.safetensors: ")
    taken = sorted((t.offset, t.offset + t.nbytes) for t in found.values())
    assert all(8 + len(text) <= begin <= end <= file_nbytes for begin, end in taken)
    assert all(a[1] <= b[0] for a, b in pairwise(taken))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are no safetensors file"),
        (b"1234567", "7 bytes are no safetensors file"),
        ((2**63).to_bytes(8, "little"), "above the format's limit of 100000000"),
        ((100).to_bytes(8, "little") + b"{}", "its header needs 108 bytes and the file has 10"),
        (encode(b"\xff{}"), "not valid JSON"),
        (encode(b"{"), "not valid JSON"),
        (encode(b'{"a": 1, "a": 2}'), "key 'a' appears twice"),
        (encode(b"[" * 100_000), "nested too deeply"),
        (encode(b"9" * 10_000), "not valid JSON"),
        (encode([GOOD]), "a list, not a JSON object"),
        (encode({"a": 3}), "'a': its entry is a int, not an object"),
        (encode({"a": {**GOOD, "dtype": "F12"}}), "'a': unknown dtype 'F12'; known: BOOL"),
        (encode({"a": {**GOOD, "dtype": ["F32"]}}), "'a': unknown dtype list of 1"),
        (encode({"a": {"dtype": "F32", "shape": [6]}}), "'a': data_offsets=None: must be a list"),
        (encode({"a": {**GOOD, "shape": "2,3"}}), "'a': shape='2,3': must be a list"),
        (encode({"a": {**GOOD, "shape": [1] * 17}}), "shape=list of 17: must be a list of at most"),
        (encode({"a": {**GOOD, "shape": [-2, -3]}}), "shape: -2 must be an integer in"),
        (encode({"a": {**GOOD, "shape": [2.0, 3]}}), "shape: 2.0 must be an integer in"),
        (encode({"a": {**GOOD, "shape": [True, 6]}}), "shape: True must be an integer in"),
        (encode({"a": {**GOOD, "shape": [2**63, 0]}}), "must be an integer in"),
        (encode({"a": {**GOOD, "data_offsets": [0]}}), "data_offsets=(0,): must be [begin, end]"),
        (encode({"a": {**GOOD, "data_offsets": [24, 0]}}), "must be [begin, end]"),
        (encode({"a": {**GOOD, "data_offsets": [0, 20]}}), "F32 [2, 3] does not fill the 20 bytes"),
        (encode({"a": {**GOOD, "shape": [2, 4]}}), "F32 [2, 4] does not fill the 24 bytes"),
        (encode({"a": GOOD}, 23), "truncated: tensor 'a' ends at byte"),
        (encode({"a": GOOD, "b": GOOD}), "tensors 'a' and 'b' overlap"),
        (
            encode({"a": GOOD, "b": {**GOOD, "data_offsets": [23, 47]}}),
            "tensors 'a' and 'b' overlap",
        ),
    ],
)
def test_a_fault_is_named(tmp_path, content, message):
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, content)
    assert str(tmp_path / "model.safetensors") in str(refused.value)
    assert message in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: cannot be read: No such file"):
        read_header(tmp_path / "gone.safetensors")


def test_a_header_above_the_limit_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="above the format's limit"):
        read_header(path)


def test_a_gap_between_tensors_is_allowed(tmp_path):
    header = {"a": GOOD, "b": {**GOOD, "data_offsets": [32, 56]}}
    found = read(tmp_path, encode(header))
    assert found["b"].offset - found["a"].offset == 32


def test_a_long_hostile_name_does_not_fill_the_message(tmp_path):
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, encode({"\ud800" * 100_000: 3}))
    assert len(str(refused.value)) < 1000
    str(refused.value).encode()
