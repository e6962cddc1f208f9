"""Small element-by-element functions, compiled so that each is one launch.

Whether a function is compiled may change bits on a GPU (contraction across fused operations), so
these are the only forms: nothing else in qwisp computes them another way.
"""

import mlx.core as mx

from qwisp.kernels.compiled import compiled


@compiled(shapeless=True)
def silu(x: mx.array) -> mx.array:
    """`x * sigmoid(x)`."""
    return x * mx.sigmoid(x)


@compiled(shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """`silu(gate) * up`."""
    return gate * mx.sigmoid(gate) * up


@compiled(shapeless=True)
def sigmoid_gate(x: mx.array, gate: mx.array) -> mx.array:
    """`x * sigmoid(gate)`."""
    return x * mx.sigmoid(gate)


@compiled(shapeless=True)
def silu_gate_f32(x: mx.array, gate: mx.array) -> mx.array:
    """`x * silu(gate)` computed in f32, in the dtype of `x`."""
    wide = gate.astype(mx.float32)
    return (x.astype(mx.float32) * (wide * mx.sigmoid(wide))).astype(x.dtype)
