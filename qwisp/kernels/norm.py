"""RMS norm of rows."""

import mlx.core as mx

from qwisp.kernels.compiled import compiled
from qwisp.kernels.linear import Phase


def rms_norm(x: mx.array, weight: mx.array, eps: float, phase: Phase) -> mx.array:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last axis, row by row.

    x: `[rows, ..., dim]`. weight: `[dim]`. Same shape and dtype back. In decode it is compiled,
    which fuses what it consists of on a CPU; prefill's shapes are too many to keep one for each.
    """
    return (_compiled if phase == "decode" else mx.fast.rms_norm)(x, weight, eps)


@compiled()
def _compiled(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps)
