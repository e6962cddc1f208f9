"""Reads the `quantization` block of config.json: one default, and entries for single modules."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwisp.engine.json_object import shown
from qwisp.engine.layout import canonical_name
from qwisp.errors import CheckpointError
from qwisp.kernels.weights import Quantization

SUPPORTED_BITS = (4, 8)
SUPPORTED_GROUP_SIZES = (32, 64, 128)

_MLX_DEFAULTS: Mapping[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}
"""What MLX takes where a module's own entry leaves something out; not the block's default."""


@dataclass(frozen=True)
class QuantizationConfig:
    """How the modules of a checkpoint are declared to be quantised."""

    path: Path
    """The config.json it came from, for messages."""
    default: Quantization | None
    """Of modules without an entry; None: config.json has no quantization block."""
    entries: Mapping[str, Mapping[str, Any] | bool]
    """Entries for single modules, by canonical name. False: not quantised. True: as the default."""

    def of(self, module_path: str) -> Quantization | None:
        """What is declared for a module, None: not quantised.

        Raises:
            CheckpointError: what is declared is not supported.
        """
        name = canonical_name(module_path)
        entry = self.entries.get(name, True)
        if isinstance(entry, bool):
            return self.default if entry else None
        return _parse({**_MLX_DEFAULTS, **entry}, f"{self.path}: quantization.{name}")

    def names(self, module_path: str) -> bool:
        """Whether a module has an entry of its own."""
        return canonical_name(module_path) in self.entries


def read_quantization(raw: Mapping[str, Any], path: Path) -> QuantizationConfig:
    """The quantisation that config.json declares. Entries may carry or lack a prefix.

    Args:
        raw: the whole config.json.
        path: where it came from, for messages.

    Raises:
        CheckpointError: the checkpoint is quantised in a way that is not supported, or two entries
            for one module disagree.
    """
    block = raw.get("quantization")
    if block is None:
        _refuse_foreign_method(raw, path)
        return QuantizationConfig(path, None, {})
    if not isinstance(block, dict):
        raise CheckpointError(f"{path}: quantization={shown(block)}: must be an object")
    entries: dict[str, Mapping[str, Any] | bool] = {}
    for name, entry in block.items():
        if isinstance(entry, dict | bool):
            known = entries.setdefault(canonical_name(name), entry)
            if known != entry:
                raise CheckpointError(
                    f"{path}: quantization: two entries for {shown(canonical_name(name))} disagree"
                )
    return QuantizationConfig(path, _parse(block, f"{path}: quantization"), entries)


def _refuse_foreign_method(raw: Mapping[str, Any], path: Path) -> None:
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        foreign = part.get("quantization_config")
        if foreign is not None:
            method = foreign.get("quant_method") if isinstance(foreign, dict) else foreign
            raise CheckpointError(
                f"{path}: quantization_config.quant_method={shown(method)} is not supported; "
                "supported: MLX affine with a quantization block; convert with mlx_lm.convert"
            )


def _parse(entry: Mapping[str, Any], where: str) -> Quantization:
    mode = entry.get("mode", "affine")
    if mode != "affine":
        raise CheckpointError(f"{where}: mode={shown(mode)} is not supported; supported: 'affine'")
    for field, supported in (("bits", SUPPORTED_BITS), ("group_size", SUPPORTED_GROUP_SIZES)):
        value = entry.get(field)
        if type(value) is not int or value not in supported:
            allowed = ", ".join(map(str, supported))
            raise CheckpointError(
                f"{where}: {field}={shown(value)} is not supported; supported: {allowed}"
            )
    return Quantization(bits=entry["bits"], group_size=entry["group_size"])
