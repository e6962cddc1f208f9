"""Only `qwisp.kernels` multiplies matrices, so that `Numerics` governs every such call (L1)."""

import ast

import pytest

from tests.tree import parse, python_files, relative

BANNED = {
    "addmm",
    "block_masked_mm",
    "conv1d",
    "conv_general",
    "cuda_kernel",
    "einsum",
    "gated_delta_update",
    "gather_mm",
    "gather_qmm",
    "gather_qqmm",
    "inner",
    "matmul",
    "metal_kernel",
    "qqmm",
    "quantized_matmul",
    "scaled_dot_product_attention",
    "segmented_mm",
    "tensordot",
    "vecdot",
}
"""Operations whose kernel, and so whose bits, depends on the shape of the call."""


def products(tree: ast.Module) -> list[str]:
    """What multiplies matrices in a file, as `line: what`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in BANNED:
            found.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            found.append(f"{node.lineno}: @")
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = {alias.name for alias in node.names}
            # mlx.nn's layers multiply out of sight.
            layers = {name for name in names if name.startswith("mlx.nn")}
            if isinstance(node, ast.ImportFrom):
                layers |= {"mlx.nn"} if str(node.module).startswith("mlx.nn") else set()
                layers |= names & {"nn"} if node.module == "mlx" else set()
            found += [f"{node.lineno}: {name}" for name in sorted((names & BANNED) | layers)]
    return found


OUTSIDE = [path for path in python_files("qwisp") if path.parent.name != "kernels"]


@pytest.mark.parametrize("path", OUTSIDE, ids=relative)
def test_no_matrix_is_multiplied_outside_the_kernels(path):
    assert products(parse(path)) == []


def test_the_kernels_do_multiply():
    assert any(products(parse(path)) for path in python_files("qwisp/kernels"))


@pytest.mark.parametrize(
    "source",
    [
        "mx.quantized_matmul(x, w)",
        "mx.fast.scaled_dot_product_attention(q, k, v)",
        "call = mx.gather_qmm",
        "x @ w.T",
        "x @= w",
        "from mlx.core import matmul",
        "import mlx.nn as nn",
        "from mlx import nn",
        "from mlx.nn import Linear",
    ],
)
def test_a_product_is_found_in_every_form(source):
    assert products(ast.parse(source)) != []
