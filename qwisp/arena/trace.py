"""Recorded routes: which experts every layer step asked for, in a compact file.

A file is one line of JSON (`TraceHeader`), then records, little-endian and without padding:

| bytes | field |
|---|---|
| 1 | kind: 0 prefill, 1 decode, 255 end |
| 2 | layer |
| 4 | rows |
| 4 | CRC-32 of the 7 bytes above and of the ids |
| rows x top_k x (1 or 2) | expert ids row by row: 1 byte each up to 256 experts, else 2 |

The end record has layer 0, the number of the records before it in place of rows, and no ids. A file
without it was cut off, by a crash before `close()` or later.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwisp.errors import TraceError

StepKind = Literal["prefill", "decode"]
"""What a layer step was part of."""

_KINDS: tuple[StepKind, ...] = get_args(StepKind)
_END = 255
_HEAD = struct.Struct("<BHI")
_CRC = struct.Struct("<I")
_RECORD_NBYTES = _HEAD.size + _CRC.size
_MAX_HEADER_NBYTES = 1 << 20
_BUFFER_NBYTES = 1 << 16


class TraceHeader(BaseModel):
    """The first line of a trace file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    magic: Literal["qwisp-trace"] = "qwisp-trace"
    version: Literal[1] = 1
    fingerprint: str
    """Of the checkpoint whose routes these are."""
    num_experts: Annotated[int, Field(ge=1, le=1 << 16)]
    top_k: Annotated[int, Field(ge=1)]
    layers: tuple[Annotated[int, Field(ge=0, lt=1 << 16)], ...]

    @property
    def id_dtype(self) -> str:
        """Numpy name of the stored expert ids."""
        return "<u1" if self.num_experts <= 256 else "<u2"


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One recorded layer step."""

    layer: int
    kind: StepKind
    routes: npt.NDArray[Any]
    """[rows, top_k] expert ids, unsigned, read-only."""


class TraceWriter:
    """Appends layer steps to a new file, replacing an old one.

    Writes are buffered: a crash loses at most what is not flushed yet. `close()` marks the end.
    """

    def __init__(self, path: Path, file: BinaryIO, header: TraceHeader) -> None:
        self._path = path
        self._file = file
        self._header = header
        self._num_records = 0
        self._write(json.dumps(header.model_dump(), sort_keys=True).encode() + b"\n")

    @classmethod
    def create(
        cls, path: Path, *, fingerprint: str, num_experts: int, top_k: int, layers: Sequence[int]
    ) -> Self:
        """Opens the file and writes its header.

        Raises:
            TraceError: the file cannot be written, or such routes cannot be recorded.
        """
        try:
            header = TraceHeader(
                fingerprint=fingerprint, num_experts=num_experts, top_k=top_k, layers=tuple(layers)
            )
            file = path.open("wb", buffering=_BUFFER_NBYTES)
        except ValidationError as invalid:
            raise TraceError(f"{path}: these routes cannot be recorded: {invalid}") from invalid
        except OSError as error:
            raise TraceError(f"{path}: cannot write the trace: {error}") from error
        return cls(path, file, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def record(self, layer: int, kind: StepKind, routes: npt.NDArray[Any]) -> None:
        """Appends one layer step. `routes`: integers [rows, top_k], each an expert's id.

        Raises:
            TraceError: the routes do not have the header's top_k, or the file cannot be written.
        """
        if routes.ndim != 2 or routes.shape[1] != self._header.top_k:
            raise TraceError(
                f"{self._path}: routes of shape {routes.shape}, top_k={self._header.top_k}"
            )
        ids = routes.astype(self._header.id_dtype).tobytes()
        self._write_record(_KINDS.index(kind), layer, routes.shape[0], ids)
        self._num_records += 1

    def flush(self) -> None:
        """Hands all records so far to the operating system."""
        try:
            self._file.flush()
        except OSError as error:
            raise TraceError(f"{self._path}: cannot write the trace: {error}") from error

    def close(self) -> None:
        """Writes the end record and closes the file. May be called again.

        Raises:
            TraceError: the file cannot be written; it is closed nevertheless.
        """
        if self._file.closed:
            return
        try:
            self._write_record(_END, 0, self._num_records, b"")
        finally:
            try:
                # Flushes, and closes even where that fails.
                self._file.close()
            except OSError as error:
                raise TraceError(f"{self._path}: cannot write the trace: {error}") from error

    def _write_record(self, kind: int, layer: int, rows: int, ids: bytes) -> None:
        head = _HEAD.pack(kind, layer, rows)
        self._write(head + _CRC.pack(zlib.crc32(ids, zlib.crc32(head))) + ids)

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise TraceError(f"{self._path}: cannot write the trace: {error}") from error


class Trace:
    """A validated trace file, held in memory. Iterating gives its steps in the order recorded."""

    def __init__(
        self, header: TraceHeader, data: bytes, records: Sequence[int], *, is_complete: bool
    ) -> None:
        self.header = header
        self.is_complete = is_complete
        """False: the file was cut off, and an unknown number of later steps is missing."""
        self._data = data
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TraceStep]:
        for start in self._records:
            kind, layer, rows = _HEAD.unpack_from(self._data, start)
            ids = np.frombuffer(
                self._data,
                dtype=self.header.id_dtype,
                count=rows * self.header.top_k,
                offset=start + _RECORD_NBYTES,
            )
            yield TraceStep(layer, _KINDS[kind], ids.reshape(rows, self.header.top_k))


def read_trace(path: Path, *, allow_truncated: bool = False) -> Trace:
    """Reads and validates a whole trace file.

    Args:
        path: The file.
        allow_truncated: Take the whole records of a file that was cut off, instead of refusing it.

    Raises:
        TraceError: the file cannot be read, is not a trace of this version, is corrupt or cut off.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot read the trace: {error}") from error
    header, start = _parse_header(path, data)
    records: list[int] = []
    while True:
        end = _record_end(header, data, start)
        if end is None:
            if allow_truncated:
                return Trace(header, data, records, is_complete=False)
            raise TraceError(
                f"{path}: cut off in record {len(records)}, at byte {start} of {len(data)}, so "
                f"steps are missing; allow_truncated=True reads the {len(records)} whole records"
            )
        if _check_record(path, header, data, start, end, len(records)):
            break
        records.append(start)
        start = end
    if end != len(data):
        raise TraceError(f"{path}: corrupt: {len(data) - end} bytes after the end record")
    return Trace(header, data, records, is_complete=True)


def _parse_header(path: Path, data: bytes) -> tuple[TraceHeader, int]:
    newline = data.find(b"\n", 0, _MAX_HEADER_NBYTES)
    if newline < 0 or b'"qwisp-trace"' not in data[:newline]:
        raise TraceError(f"{path}: not a qwisp trace")
    try:
        header = TraceHeader.model_validate_json(data[:newline])
    except ValidationError as invalid:
        raise TraceError(f"{path}: the header cannot be used: {invalid}") from invalid
    return header, newline + 1


def _record_end(header: TraceHeader, data: bytes, start: int) -> int | None:
    """Where the record at `start` ends, or None where the file ends before."""
    ids_start = start + _RECORD_NBYTES
    if ids_start > len(data):
        return None
    kind, _, rows = _HEAD.unpack_from(data, start)
    id_nbytes = np.dtype(header.id_dtype).itemsize
    end = ids_start if kind == _END else ids_start + int(rows) * header.top_k * id_nbytes
    return end if end <= len(data) else None


def _check_record(
    path: Path, header: TraceHeader, data: bytes, start: int, end: int, num_before: int
) -> bool:
    """Whether this is the end record; raises TraceError for a record that cannot be right."""
    kind, layer, rows = _HEAD.unpack_from(data, start)
    ids_start = start + _RECORD_NBYTES
    (stored,) = _CRC.unpack_from(data, start + _HEAD.size)
    actual = zlib.crc32(data[ids_start:end], zlib.crc32(data[start : start + _HEAD.size]))
    where = f"{path}: corrupt record {num_before} at byte {start}"
    if stored != actual:
        raise TraceError(f"{where}: checksum {actual:#010x}, expected {stored:#010x}")
    if kind == _END:
        if rows != num_before:
            raise TraceError(f"{where}: the end counts {rows} records, {num_before} are there")
        return True
    if kind >= len(_KINDS) or layer not in header.layers:
        raise TraceError(f"{where}: kind {kind}, layer {layer}")
    ids = np.frombuffer(data[ids_start:end], dtype=header.id_dtype)
    if ids.size and int(ids.max()) >= header.num_experts:
        raise TraceError(f"{where}: expert {ids.max()} of {header.num_experts}")
    return False
