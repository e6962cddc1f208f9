"""Every kernel class has a mask of its own, and the check before a profile would notice if not."""

import mlx.core as mx
import numpy as np
import pytest

from tests import class_check, kernel_masks
from tests.class_check import (
    attention_kernels,
    check_attention_differs,
    check_products_differ,
    product_kernels,
)
from tests.dispatch import PROFILES, Quantized
from tests.kernel_masks import MIN_REDUCTION, MaskBook, cut, draw, fingerprint, key_cut, split

ALL = pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)


@pytest.mark.parametrize("length", [64, 128, 256])
def test_masks_of_many_classes_differ_however_short_the_reduction(length):
    book = MaskBook()
    prints = {fingerprint(book.mask(("gemm", rows), length)) for rows in range(1000)}
    assert len(prints) == 1000


def test_a_mask_does_not_depend_on_the_classes_met_before():
    kernels = [("gemm", rows) for rows in range(20)]
    forward, backward = MaskBook(), MaskBook()
    first = [forward.mask(kernel, 64) for kernel in kernels]
    last = [backward.mask(kernel, 64) for kernel in reversed(kernels)][::-1]
    np.testing.assert_array_equal(first, last)


def test_a_mask_and_its_complement_count_as_one():
    mask = draw(("qmv",), 64, 0)
    assert fingerprint(mask) == fingerprint(~mask)


def test_a_class_that_collides_draws_again(monkeypatch):
    monkeypatch.setattr(
        kernel_masks, "draw", lambda kernel, length, attempt: draw(("same",), length, attempt)
    )
    book = MaskBook()
    masks = [book.mask((name,), 64) for name in ("qmv", "qmv_wide", "qmm_t")]
    assert len({fingerprint(mask) for mask in masks}) == 3


def test_classes_that_cannot_be_told_apart_are_an_error(monkeypatch):
    monkeypatch.setattr(
        kernel_masks, "draw", lambda kernel, length, attempt: draw(("same",), length, 0)
    )
    book = MaskBook()
    book.mask(("qmv",), 64)
    with pytest.raises(RuntimeError, match="qmm_t"):
        book.mask(("qmm_t",), 64)


def test_a_short_reduction_stays_whole():
    x = mx.arange(MIN_REDUCTION - 1)
    assert cut(("qmv",), x.size) is None
    assert split(lambda part: part, x, None) is x


def test_keys_are_dealt_with_the_period_of_the_kernel():
    for kernel, period in ((("sdpa_vector",), 32), (("sdpa_vector_2pass", 64, 1), 64)):
        first = np.array(key_cut(kernel, 200)[0])
        np.testing.assert_array_equal(first[period:], first[:-period])
        assert (first[period // 2 :] != first[: -period // 2]).any()


@ALL
def test_the_check_covers_several_classes_of_every_length(profile):
    assert {64, 128, 256, 512} == set(product_kernels(profile, 8))
    for rows in (1, 2, 8, 16, 40, 129):
        kernel = profile.kernel(Quantized(rows, 1024, 256).scaled(8))
        assert kernel in product_kernels(profile, 8)[256]
    assert len(attention_kernels(profile, 8)) > 20


def test_the_check_finds_products_of_two_classes_that_agree(monkeypatch):
    kernels = [("qmv",), ("qmv_wide",)]
    check_products_differ(kernels, 64)
    monkeypatch.setattr(class_check, "cut", lambda kernel, length: cut(("qmv",), length))
    with pytest.raises(AssertionError, match="agree at length 64"):
        check_products_differ(kernels, 64)


def test_the_check_finds_attention_of_two_classes_that_agrees(monkeypatch):
    kernels = [("sdpa_vector",), ("unfused", 1, 1, 96)]
    check_attention_differs(kernels)
    monkeypatch.setattr(class_check, "cut", lambda kernel, length: None)
    check_attention_differs(kernels)
    monkeypatch.setattr(class_check, "key_cut", lambda kernel, length: key_cut(kernels[0], length))
    with pytest.raises(AssertionError, match="agree"):
        check_attention_differs(kernels)
