"""Where the bytes of the experts are: files, offsets, sizes. Opens nothing and reads nothing."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ExpertPart:
    """One tensor part of every expert of a layer, stacked expert by expert in one file.

    Expert `e`'s bytes are `[offset + e * nbytes, offset + (e + 1) * nbytes)` of `path`.
    """

    name: str
    """Projection and tensor, for instance `gate_proj.weight`."""
    path: Path
    offset: int
    """Byte in the file where expert 0 starts."""
    nbytes: int
    """Bytes of one expert."""
    shape: tuple[int, ...]
    """Shape of one expert's tensor."""
    dtype: str
    """Name of the MLX dtype, for instance `uint32` or `bfloat16`."""


@dataclass(frozen=True)
class ExpertLayer:
    """All routed experts of one layer. Parts have one fixed order, so that equal bytes mean equal
    experts."""

    layer: int
    num_experts: int
    parts: tuple[ExpertPart, ...]

    @property
    def expert_nbytes(self) -> int:
        """Payload bytes of one expert."""
        return sum(part.nbytes for part in self.parts)
