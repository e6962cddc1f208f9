"""Reads and checks the header of a safetensors file: names, types and byte ranges, never the data.

A file is eight bytes of header length (little endian), the header as JSON, then the data.
Everything that the header says is checked against the file before it is believed.
"""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from qwisp.engine.json_object import parse_json_object, shown
from qwisp.errors import CheckpointError

_LENGTH_NBYTES = 8
_MAX_HEADER_NBYTES = 100_000_000
"""The format's own limit."""
_MAX_DIMS = 16

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element, by the name that the format gives its type."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor is and what it is."""

    name: str
    path: Path
    dtype: str
    """The format's name of the type, for instance `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Byte in the file where the data starts."""
    nbytes: int

    def __str__(self) -> str:
        return f"tensor {shown(self.name)} in {self.path}"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, by name, in the order of the header.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header is not valid.
    """
    header, file_nbytes = read_raw_header(path)
    return parse_header(header, path, file_nbytes)


def read_raw_header(path: Path) -> tuple[bytes, int]:
    """The header of a safetensors file as it is stored, and the size of the file.

    Reads at most the length prefix and, if it fits the file and the limit, the header.

    Raises:
        CheckpointError: the file cannot be read or is too short for the header it announces.
    """
    try:
        with path.open("rb") as file:
            file_nbytes = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH_NBYTES)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < _LENGTH_NBYTES:
                raise CheckpointError(f"{path}: {file_nbytes} bytes are no safetensors file")
            if length > _MAX_HEADER_NBYTES:
                raise CheckpointError(
                    f"{path}: no safetensors file, or a damaged one: it announces a header of "
                    f"{length} bytes, above the format's limit of {_MAX_HEADER_NBYTES}"
                )
            if length > file_nbytes - _LENGTH_NBYTES:
                raise CheckpointError(
                    f"{path}: truncated: its header needs {_LENGTH_NBYTES + length} bytes and the "
                    f"file has {file_nbytes}; copy or download it again"
                )
            header = file.read(length)
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be read: {failure.strerror}") from failure
    if len(header) < length:
        raise CheckpointError(f"{path}: truncated while its header was read")
    return header, file_nbytes


def parse_header(header: bytes, path: Path, file_nbytes: int) -> dict[str, TensorInfo]:
    """The tensors that a header describes. Gaps between tensors are allowed, overlaps are not.

    Args:
        header: the header as it is stored.
        path: the file it came from, for `TensorInfo.path` and for messages.
        file_nbytes: size of that file.

    Raises:
        CheckpointError: the header is not valid, or the file is too short for a tensor of it.
    """
    data_start = _LENGTH_NBYTES + len(header)
    tensors = {
        name: _tensor(name, entry, path, data_start)
        for name, entry in parse_json_object(header, f"{path}: header").items()
        if name != "__metadata__"
    }
    _check_ranges(tensors, path, file_nbytes)
    return tensors


def _tensor(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: its entry is a {type(entry).__name__}, not an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{where}: unknown dtype {shown(dtype)}; known: {', '.join(DTYPE_BITS)}"
        )
    shape = _naturals(entry.get("shape"), f"{where}: shape")
    offsets = _naturals(entry.get("data_offsets"), f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets={offsets}: must be [begin, end]")
    begin, end = offsets
    if (end - begin) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        raise CheckpointError(
            f"{where}: {dtype} {list(shape)} does not fill the {end - begin} bytes that "
            "data_offsets gives it"
        )
    return TensorInfo(name, path, dtype, shape, data_start + begin, end - begin)


def _naturals(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        raise CheckpointError(f"{what}={shown(value)}: must be a list of at most {_MAX_DIMS}")
    for number in value:
        if type(number) is not int or not 0 <= number < 2**63:
            raise CheckpointError(f"{what}: {shown(number)} must be an integer in [0, 2**63)")
    return tuple(value)


def _check_ranges(tensors: dict[str, TensorInfo], path: Path, file_nbytes: int) -> None:
    previous: TensorInfo | None = None
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        end = tensor.offset + tensor.nbytes
        if end > file_nbytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {shown(tensor.name)} ends at byte {end} and the file "
                f"has {file_nbytes}; copy or download it again"
            )
        if previous is not None and tensor.offset < previous.offset + previous.nbytes:
            raise CheckpointError(
                f"{path}: tensors {shown(previous.name)} and {shown(tensor.name)} overlap"
            )
        previous = tensor
