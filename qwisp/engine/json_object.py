"""Reads JSON objects that come from outside: bounded, without duplicate keys, every fault named."""

import json
from pathlib import Path
from typing import Any

from qwisp.errors import CheckpointError


def shown(value: object) -> str:
    """A value from a file as an error message shows it: escaped, and cut where it is very long."""
    # repr() of nested containers may be huge or recurse too deeply.
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text)} characters)"


def read_bounded(path: Path, max_nbytes: int) -> bytes:
    """The content of a file.

    Raises:
        CheckpointError: the file cannot be read or is longer than `max_nbytes`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_nbytes + 1)
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be read: {failure.strerror}") from failure
    if len(content) > max_nbytes:
        raise CheckpointError(f"{path}: longer than the limit of {max_nbytes} bytes")
    return content


def parse_json_object(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object in UTF-8.

    Raises:
        CheckpointError: the content is not JSON, not an object, or has a key twice in one object.
    """
    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as fault:
        raise CheckpointError(f"{where}: not valid JSON: {fault}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: a {type(parsed).__name__}, not a JSON object")
    return parsed


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"key {shown(key)} appears twice")
        unique[key] = value
    return unique
