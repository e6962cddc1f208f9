"""Finds the safetensors files of a model folder and joins their headers."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwisp.engine.json_object import parse_json_object, read_bounded, shown
from qwisp.engine.layout import canonical_name, is_skipped
from qwisp.engine.safetensors_header import TensorInfo, parse_header, read_raw_header
from qwisp.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
_MAX_INDEX_NBYTES = 100_000_000


@dataclass(frozen=True)
class ShardTensors:
    """The language model's tensors of all shards."""

    tensors: dict[str, TensorInfo]
    """By canonical name, without those that are never loaded."""
    digest: bytes
    """SHA-256 over the headers, in the order of the files' names."""


def read_shards(folder: Path) -> ShardTensors:
    """The tensors of a model folder: the files that its index names, or else its safetensors files.

    Raises:
        CheckpointError: a file is missing or damaged, the index and a file disagree, or a tensor
            exists twice.
    """
    weight_map = _read_index(folder)
    files = _files(folder) if weight_map is None else _indexed_files(folder, weight_map)
    tensors: dict[str, TensorInfo] = {}
    full_names: dict[str, set[str]] = {}
    digest = hashlib.sha256()
    for path in files:
        header, file_nbytes = read_raw_header(path)
        digest.update(len(header).to_bytes(8, "little") + header)
        found = parse_header(header, path, file_nbytes)
        full_names[path.name] = set(found)
        _add(tensors, list(found.values()))
    for name, file_name in (weight_map or {}).items():
        if name not in full_names[file_name]:
            raise CheckpointError(
                f"{folder / INDEX_NAME}: tensor {shown(name)} is not in {file_name}, where the "
                "index says it is; copy or download both again"
            )
    return ShardTensors(tensors, digest.digest())


def _add(tensors: dict[str, TensorInfo], found: Sequence[TensorInfo]) -> None:
    for tensor in found:
        if is_skipped(tensor.name):
            continue
        known = tensors.setdefault(canonical_name(tensor.name), tensor)
        if known is not tensor:
            raise CheckpointError(
                f"{tensor} exists twice: it is also {known}; remove the files that do not belong "
                f"to this model, or add a {INDEX_NAME} that names those that do"
            )


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    weight_map = parse_json_object(read_bounded(path, _MAX_INDEX_NBYTES), str(path)).get(
        "weight_map"
    )
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map={shown(weight_map)}: must be an object")
    for name, file_name in weight_map.items():
        # A file name that leads out of the folder would read whatever the writer likes.
        if not (
            isinstance(file_name, str)
            and file_name.endswith(".safetensors")
            and Path(file_name).name == file_name
        ):
            raise CheckpointError(
                f"{path}: weight_map[{shown(name)}]={shown(file_name)}: must be the name of a "
                "*.safetensors file in this folder"
            )
    return weight_map


def _indexed_files(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    files = [folder / file_name for file_name in sorted(set(weight_map.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder / INDEX_NAME} names files that are not in the folder: "
            f"{', '.join(map(shown, missing[:5]))}{' and more' if len(missing) > 5 else ''}; "
            "download them, or delete the index if the folder is complete without it"
        )
    return files


def _files(folder: Path) -> list[Path]:
    # Hidden files, such as macOS's "._model.safetensors", are not ours.
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors file and no {INDEX_NAME}")
    return [p for p in files if p.name.startswith("model")] or files
