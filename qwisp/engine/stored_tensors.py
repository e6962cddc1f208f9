"""Matches the tensors that a checkpoint stores with those that its model needs; checks each one."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qwisp.engine.json_object import shown
from qwisp.engine.layout import Matrix, Vector
from qwisp.engine.model_config import ModelConfig
from qwisp.engine.quantization_config import SUPPORTED_BITS, SUPPORTED_GROUP_SIZES
from qwisp.engine.safetensors_header import TensorInfo
from qwisp.errors import CheckpointError
from qwisp.kernels.weights import Quantization

_FLOATS = ("F32", "F16", "BF16")
_UNCONVERTED = re.compile(r"layers\.\d+\.mlp\.experts\.")
_CONVERT = "convert the checkpoint with mlx_lm.convert (-q quantizes it)"

Tensors = Mapping[str, TensorInfo]
"""What a checkpoint stores, by canonical name."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix, or a stack of them on a leading axis, as the files hold it."""

    weight: TensorInfo
    scales: TensorInfo | None = None
    biases: TensorInfo | None = None
    quantization: Quantization | None = None
    """None: dense, and then there are no scales and biases."""

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """What it consists of, in the order weight, scales, biases."""
        return tuple(t for t in (self.weight, self.scales, self.biases) if t is not None)


def check_names(
    tensors: Tensors,
    matrices: Sequence[Matrix],
    vectors: Sequence[Vector],
    config: ModelConfig,
    ignored: Iterable[str],
) -> None:
    """Everything needed is stored, and everything stored is needed or ignored.

    Args:
        tensors: what the checkpoint stores.
        matrices: what the model needs, experts included.
        vectors: what else it needs.
        config: says which matrices must be quantised.
        ignored: modules that may be stored but are not used.

    Raises:
        CheckpointError: tensors are missing, unknown, or still have their Hugging Face form.
    """
    for name, tensor in tensors.items():
        is_conv = name.endswith("conv1d.weight") and tensor.shape[-1:] != (1,)
        if is_conv or _UNCONVERTED.match(name):
            raise CheckpointError(
                f"{tensor} has the form of a Hugging Face checkpoint, not of an MLX one; {_CONVERT}"
            )
    needed = {v.name for v in vectors} | {f"{m.path}.weight" for m in matrices}
    for path in (m.path for m in matrices):
        parts = {f"{path}.scales", f"{path}.biases"}
        is_declared = config.quantization.names(path) and config.quantization_of(path) is not None
        if is_declared or not parts.isdisjoint(tensors):
            needed |= parts
    folder = config.quantization.path.parent
    missing = sorted(needed - set(tensors))
    if missing:
        raise CheckpointError(f"{folder}: tensors are missing: {_some(missing)}")
    allowed = needed | {f"{m}.{part}" for m in ignored for part in ("weight", "scales", "biases")}
    unknown = [tensor.name for name, tensor in sorted(tensors.items()) if name not in allowed]
    if unknown:
        raise CheckpointError(
            f"{folder}: model_type={config.spec.model_type} has no use for these tensors, and "
            f"leaving them out could change the model: {_some(unknown)}"
        )


def stored_matrix(matrix: Matrix, tensors: Tensors, config: ModelConfig) -> StoredMatrix:
    """A resident matrix: quantised if and only if it has scales.

    Raises:
        CheckpointError: a type, a shape or the declared quantisation does not fit.
    """
    if f"{matrix.path}.scales" in tensors:
        return _quantized(matrix, (), tensors, config)
    weight = tensors[f"{matrix.path}.weight"]
    _check(weight, (matrix.out_features, matrix.in_features), _FLOATS, "not quantised")
    return StoredMatrix(weight)


def stored_experts(
    matrix: Matrix, num_experts: int, tensors: Tensors, config: ModelConfig
) -> StoredMatrix:
    """One projection of all experts of a layer, stacked.

    Raises:
        CheckpointError: it is not quantised, or does not fit.
    """
    if f"{matrix.path}.scales" not in tensors:
        raise CheckpointError(
            f"{tensors[f'{matrix.path}.weight']}: experts that are not quantised cannot be "
            f"streamed; {_CONVERT}"
        )
    return _quantized(matrix, (num_experts,), tensors, config)


def stored_vector(vector: Vector, tensors: Tensors) -> TensorInfo:
    """A tensor that is never quantised.

    Raises:
        CheckpointError: its type or shape does not fit.
    """
    tensor = tensors[vector.name]
    _check(tensor, vector.shape, _FLOATS, "as config.json says")
    return tensor


def common_scale_dtype(matrices: Iterable[StoredMatrix]) -> str:
    """The type of all scales, by its safetensors name.

    Raises:
        CheckpointError: two matrices have scales of different types.
    """
    scales = [m.scales for m in matrices if m.scales is not None]
    for other in scales:
        if other.dtype != scales[0].dtype:
            raise CheckpointError(
                f"{other} is {other.dtype}, but {scales[0]} is {scales[0].dtype}: the scales of "
                "all modules must have one type, which the activations then use"
            )
    return scales[0].dtype


def _quantized(
    matrix: Matrix, stack: tuple[int, ...], tensors: Tensors, config: ModelConfig
) -> StoredMatrix:
    weight, scales, biases = (
        tensors[f"{matrix.path}.{part}"] for part in ("weight", "scales", "biases")
    )
    quantization = _quantization(matrix, weight, scales, config)
    bits, group_size = quantization.bits, quantization.group_size
    if matrix.in_features % group_size:
        raise CheckpointError(
            f"{weight}: group_size={group_size} does not divide its {matrix.in_features} inputs"
        )
    how = f"{bits}-bit, group size {group_size}"
    rows = (*stack, matrix.out_features)
    groups = (*rows, matrix.in_features // group_size)
    _check(weight, (*rows, matrix.in_features * bits // 32), ("U32",), how)
    _check(scales, groups, _FLOATS, how)
    _check(biases, groups, (scales.dtype,), how)
    return StoredMatrix(weight, scales, biases, quantization)


def _quantization(
    matrix: Matrix, weight: TensorInfo, scales: TensorInfo, config: ModelConfig
) -> Quantization:
    declared = config.quantization_of(matrix.path)
    if declared is None:
        raise CheckpointError(
            f"{scales}: a module with scales, but {config.quantization.path} does not say how "
            "it is quantised"
        )
    if not config.quantization.names(matrix.path):
        # Converters leave modules out of the block whose bits are not the default's; the shapes
        # then say what holds, and mlx-lm reads them the same way.
        for bits in SUPPORTED_BITS:
            for group_size in SUPPORTED_GROUP_SIZES:
                if weight.shape[-1:] == (matrix.in_features * bits / 32,) and scales.shape[-1:] == (
                    matrix.in_features / group_size,
                ):
                    return Quantization(bits=bits, group_size=group_size)
    return declared


def _check(tensor: TensorInfo, shape: tuple[int, ...], dtypes: Sequence[str], reason: str) -> None:
    if tensor.dtype not in dtypes:
        raise CheckpointError(
            f"{tensor}: its type is {tensor.dtype}, must be {' or '.join(dtypes)} ({reason})"
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor}: its shape is {list(tensor.shape)}, must be {list(shape)} ({reason})"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(shown, names[:5])) + more
