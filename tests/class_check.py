"""Asserts, before a profile is used, that its kernel classes really give different bits."""

import functools
from collections.abc import Iterable
from itertools import product

import mlx.core as mx

from tests.dispatch import Attention, Dense, Gathered, Kernel, Profile, Quantized
from tests.kernel_masks import cut, key_cut, split, split_attention

WEIGHTS = (
    # (outputs, inputs) of the embedded model: GDN, attention, experts, router, gates, head.
    *((1024, 256), (512, 256), (8, 256), (256, 512)),
    *((128, 256), (256, 128), (64, 256), (1, 256), (8192, 256)),
    # The narrowest that tests use.
    *((64, 64), (128, 64), (512, 64)),
)
ROWS = (*range(1, 41), 64, 65, 129)
PAIRS = (*range(1, 18), 32, 64, 256)
EXPERTS = (8, 64)
QUERIES = (1, 2, 4, 8, 16, 64)
KEYS = range(1, 1300, 61)
HEAD_DIM = 64


@functools.cache
def check_classes_differ(profile: Profile, scale: int) -> None:
    """Computes one probe by every class of the profile, at the lengths and key counts tests use.

    Raises:
        AssertionError: two classes give the same bits.
    """
    for k, kernels in product_kernels(profile, scale).items():
        check_products_differ(kernels, k)
    check_attention_differs(attention_kernels(profile, scale))


def product_kernels(profile: Profile, scale: int) -> dict[int, set[Kernel]]:
    """The classes of the matrix products of `WEIGHTS`, by the length of the reduction."""
    found: dict[int, set[Kernel]] = {}
    for n, k in WEIGHTS:
        problems: list[Quantized | Dense | Gathered] = []
        for rows in ROWS:
            problems += [Quantized(rows, n, k), Quantized(rows, n, k, bits=8)]
            problems += [Dense(rows, n, k), Dense(rows, n, k, has_bias=True)]
        for pairs, experts, is_sorted in product(PAIRS, EXPERTS, (False, True)):
            problems.append(Gathered(pairs, n, k, experts, is_sorted))
            problems.append(Gathered(pairs, n, k, experts, is_sorted, bits=None))
        kernels = found.setdefault(k, set())
        kernels.update(profile.kernel(problem.scaled(scale)) for problem in problems)
    return found


def attention_kernels(profile: Profile, scale: int) -> set[Kernel]:
    """The classes of attention at `QUERIES` and `KEYS`, for one sequence and for four."""
    problems = (
        Attention(queries, keys, HEAD_DIM, heads_per_kv=2, batch=batch)
        for queries, keys, batch in product(QUERIES, KEYS, (1, 4))
    )
    return {profile.kernel(problem.scaled(scale)) for problem in problems}


def check_products_differ(kernels: Iterable[Kernel], k: int) -> None:
    """One quantised and one dense product, by every class.

    Raises:
        AssertionError: two classes give the same bits.
    """
    x = mx.random.normal((2, k), key=mx.random.key(0))
    w = mx.random.normal((32, k), key=mx.random.key(1))
    quantized = mx.quantize(w, group_size=64, bits=4)
    for form in (
        lambda part: mx.quantized_matmul(part, *quantized, group_size=64, bits=4),
        lambda part: mx.matmul(part, w.T),
    ):
        _check_distinct({kernel: split(form, x, cut(kernel, k)) for kernel in kernels}, k)


def check_attention_differs(kernels: Iterable[Kernel]) -> None:
    """One row of attention to 96 keys, by every class.

    Raises:
        AssertionError: two classes give the same bits.
    """
    q, k, v = (
        mx.random.normal((1, heads, length, HEAD_DIM), key=mx.random.key(i))
        for i, (heads, length) in enumerate(((4, 1), (2, 96), (2, 96)))
    )

    def attend(kernel: Kernel) -> mx.array:
        parts = cut(kernel, HEAD_DIM), key_cut(kernel, 96)
        return split_attention(q, k, v, HEAD_DIM**-0.5, None, *parts)

    _check_distinct({kernel: attend(kernel) for kernel in kernels}, HEAD_DIM)


def _check_distinct(outputs: dict[Kernel, mx.array], length: int) -> None:
    owners: dict[bytes, Kernel] = {}
    for kernel, output in outputs.items():
        owner = owners.setdefault(bytes(memoryview(output)), kernel)
        assert owner == kernel, f"{owner} and {kernel} agree at length {length}"
