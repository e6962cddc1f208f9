"""The kernel classes change exactly where MLX's sources say, at the shapes of a 35B model."""

import pytest

from tests.dispatch import (
    CUDA,
    M1,
    M1_ULTRA,
    M3,
    M5,
    PROFILES,
    AppleGPU,
    Attention,
    Convolution,
    Dense,
    Gathered,
    Quantized,
)

LM_HEAD = {"n": 248_320, "k": 2048}
MIDDLE = {"n": 4096, "k": 2048}
SQUARE = {"n": 2048, "k": 2048}
EXPERT = {"n": 512, "k": 2048}

M1_MAX = AppleGPU("M1_MAX", 13, "s")
APPLE = tuple(profile for profile in PROFILES if profile is not CUDA)
ALL = pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
EVERY_APPLE = pytest.mark.parametrize("profile", APPLE, ids=lambda profile: profile.name)


def starts(profile, problem, counts):
    """The counts at which the class of `problem(count)` is not that of the count before."""
    counts = list(counts)
    kernels = [profile.kernel(problem(count)) for count in counts]
    return [counts[i] for i in range(1, len(counts)) if kernels[i] != kernels[i - 1]]


@pytest.mark.parametrize(
    ("profile", "shape", "expected"),
    [
        (M1, LM_HEAD, [6]),
        (M1_MAX, LM_HEAD, [7]),
        (M1_ULTRA, LM_HEAD, [12]),
        (M3, LM_HEAD, [2, 13]),
        (M5, LM_HEAD, [2, 13, 33]),
        (CUDA, LM_HEAD, [8]),
        # From the row limit on, the reduction is split by ceil(rows / 32).
        (M1, MIDDLE, [10, 33, 65]),
        (M1_ULTRA, MIDDLE, [18, 33, 65]),
        (M3, MIDDLE, [2, 15, 33, 65]),
        (M5, MIDDLE, [2, 25, 33, 65]),
        (CUDA, MIDDLE, [8]),
        (M1, SQUARE, [14, 33, 65, 129]),
        (M1_ULTRA, SQUARE, [32, 33, 65, 129]),
        (M3, SQUARE, [2, 13, 33, 65, 129]),
        (M5, SQUARE, [2, 33, 65, 129]),
        (CUDA, SQUARE, [8]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_quantised_product_change_class_at_the_limits(profile, shape, expected, bits):
    def rows(count):
        return Quantized(count, **shape, bits=bits)

    assert starts(profile, rows, range(1, 201)) == expected


@EVERY_APPLE
def test_one_row_of_a_floating_point_mode_is_a_class_of_its_own_on_every_apple_device(profile):
    found = starts(profile, lambda m: Quantized(m, **LM_HEAD, mode="mxfp4"), range(1, 6))
    assert found == [2]


def test_a_3d_weight_makes_every_row_a_call_of_one_row_on_apple_but_not_on_cuda():
    def batched(rows):
        return Quantized(1, **LM_HEAD, batch=rows)

    for profile in APPLE:
        assert starts(profile, batched, range(1, 100)) == []
        assert profile.kernel(batched(50)) == profile.kernel(Quantized(1, **LM_HEAD))
    assert starts(CUDA, batched, range(1, 100)) == [8]


def test_narrow_weights_have_a_kernel_of_their_own_on_apple():
    assert M1.kernel(Quantized(1, n=512, k=128)) == ("qmv_quad",)
    assert M1.kernel(Quantized(1, n=512, k=128).scaled(8)) == ("qmv_fast",)


@EVERY_APPLE
def test_unsorted_pairs_are_one_class_on_apple_and_equal_a_call_of_one_row(profile):
    def gathered(pairs):
        return Gathered(pairs, **EXPERT, num_experts=16)

    assert starts(profile, gathered, range(1, 300)) == []
    assert profile.kernel(gathered(64)) == profile.kernel(Quantized(1, **EXPERT))


def test_unsorted_pairs_on_cuda_change_class_at_eight():
    assert starts(CUDA, lambda p: Gathered(p, **EXPERT, num_experts=16), range(1, 300)) == [8]
    assert CUDA.kernel(Gathered(7, **EXPERT, num_experts=16)) == CUDA.kernel(Quantized(7, **EXPERT))


@ALL
@pytest.mark.parametrize(("num_experts", "expected"), [(2, 16), (16, 64), (256, 1024)])
def test_sorted_pairs_change_class_at_sixteen_and_four_per_expert(profile, num_experts, expected):
    found = starts(
        profile,
        lambda p: Gathered(p, **EXPERT, num_experts=num_experts, is_sorted=True),
        range(8, 1100),
    )
    assert found == [expected]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (M1, [*range(2, 41)]),
        (M1_ULTRA, [*range(2, 41)]),
        (M3, [2, 6, *range(16, 41)]),
        (M5, [2, 6, *range(16, 41)]),
        (CUDA, [*range(2, 41)]),
    ],
)
def test_dense_products_change_class_at_almost_every_row_count(profile, expected):
    assert starts(profile, lambda m: Dense(m, n=256, k=2048), range(1, 41)) == expected


def test_a_bias_takes_one_dense_row_to_another_kernel_on_cuda():
    row, biased = Dense(1, n=256, k=2048), Dense(1, n=256, k=2048, has_bias=True)
    assert CUDA.kernel(row) != CUDA.kernel(biased)
    assert all(profile.kernel(row) == profile.kernel(biased) for profile in APPLE)


@ALL
def test_gathered_dense_pairs_are_one_class_unless_sorted(profile):
    def gathered(pairs, is_sorted=False):
        return Gathered(pairs, **EXPERT, num_experts=4, bits=None, is_sorted=is_sorted)

    assert starts(profile, gathered, range(1, 100)) == []
    assert profile.kernel(gathered(8)) != profile.kernel(gathered(8, is_sorted=True))


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (M1, [4096]),
        (M3, [4096]),
        (M1_ULTRA, [1024, 16384, 65536]),
        (M5, [1024, 1025, 8193, 32769, 65537]),
    ],
)
def test_attention_of_one_query_changes_class_at_these_key_counts(profile, expected):
    counts = sorted({n + d for n in (1, *expected) for d in (0, -1, 1)} - {0})
    assert starts(profile, lambda n: Attention(1, n), counts) == expected


def test_attention_of_wide_heads_is_another_class_for_every_shape_on_cuda():
    problems = [Attention(1, n, batch=b) for n in (100, 101) for b in (1, 4)]
    assert len({CUDA.kernel(problem) for problem in problems}) == 4


def test_attention_of_heads_of_128_changes_class_after_1024_keys_on_cuda():
    def narrow(keys, **kwargs):
        return Attention(1, keys, head_dim=128, **kwargs)

    assert starts(CUDA, narrow, range(1000, 1100)) == [1025]
    assert CUDA.kernel(narrow(64)) == CUDA.kernel(narrow(64, batch=4))
    assert CUDA.kernel(narrow(64)) != CUDA.kernel(narrow(64, has_array_mask=True))


@EVERY_APPLE
def test_a_batch_of_one_query_is_one_class_on_apple(profile):
    assert profile.kernel(Attention(1, 900, batch=4)) == profile.kernel(Attention(1, 900))


@EVERY_APPLE
def test_several_queries_change_class_where_the_vector_kernel_ends(profile):
    # 8 query heads for each KV head: 32 // 8 queries fit.
    assert starts(profile, lambda q: Attention(q, 900), range(1, 8)) == [5, 6, 7]
    assert starts(profile, lambda q: Attention(q, 5000), range(1, 5)) == [2, 3, 4]
    assert profile.kernel(Attention(64, 900)) != profile.kernel(Attention(64, 901))


@EVERY_APPLE
def test_narrow_heads_have_one_kernel_for_more_than_eight_queries(profile):
    def narrow(queries):
        return Attention(queries, 900, head_dim=128, heads_per_kv=1)

    assert starts(profile, narrow, range(1, 65)) == [9]


def test_a_convolution_depends_on_its_batch_on_cuda_only():
    for profile in PROFILES:
        differs = profile.kernel(Convolution(1, 4)) != profile.kernel(Convolution(4, 4))
        assert differs is (profile is CUDA)


@ALL
def test_the_embedded_model_meets_the_classes_of_a_35b_model(profile):
    heads = Quantized(1, n=8192, k=256), Quantized(1, n=65_536, k=2048)
    assert heads[0].scaled(8) == heads[1]
    for rows in range(1, 40):
        small = Quantized(rows, n=8192, k=256).scaled(8)
        assert profile.kernel(small) == profile.kernel(Quantized(rows, **LM_HEAD))
    assert Attention(1, 128, head_dim=64, heads_per_kv=2).scaled(8) == Attention(1, 1024)


def test_a_weight_of_one_output_is_not_widened():
    assert Quantized(1, n=1, k=256).scaled(8).n == 1
