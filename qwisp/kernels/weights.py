"""A matrix as the kernels take it: quantised with its own parameters, or dense."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one matrix is quantised. Taken from the checkpoint per layer and projection, never
    global."""

    bits: int
    group_size: int
    mode: str = "affine"


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """An affine-quantised matrix of `out_features` rows, or a stack of them on a leading axis.

    `weight` is uint32 `[..., out, in * bits / 32]`; `scales` and `biases` are `[..., out, in /
    group_size]` in the dtype of the activations, since MLX would otherwise convert them whole at
    every call.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    quantization: Quantization

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.weight.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + self.scales.nbytes + self.biases.nbytes


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """An unquantised matrix `[out, in]` in the dtype of the activations."""

    weight: mx.array

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.weight.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes


Weight = QuantizedWeight | DenseWeight
