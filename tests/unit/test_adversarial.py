"""The adversarial backend: bits change with the kernel class of a call and with nothing else."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from tests.adversarial import REFUSED, adversarial
from tests.dispatch import CUDA, M1, M1_ULTRA, M3, M5, PROFILES

ALL = pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)

WIDTH = 256
# As wide as 8192 outputs of 2048 inputs, where the row limits are those of lm_head.
OUTPUTS = 1024


def normal(*shape, seed=0):
    array = mx.random.normal(shape, key=mx.random.key(seed))
    mx.eval(array)
    return array


def raw(array):
    return bytes(memoryview(mx.contiguous(array)))


def quantized(*shape, bits=4):
    parts = mx.quantize(normal(*shape, seed=9) / 16, group_size=64, bits=bits)
    mx.eval(parts)
    return parts


def project(x, weight):
    return mx.quantized_matmul(x, *weight, transpose=True, group_size=64, bits=4)


def gather(x, weight, experts, *, is_sorted=False):
    """One row of x for each expert, `[pairs, outputs]`."""
    out = mx.gather_qmm(
        x[:, None],
        *weight,
        rhs_indices=mx.array(experts),
        group_size=64,
        bits=4,
        sorted_indices=is_sorted,
    )
    return out[:, 0]


def attend(q, k, v, **kwargs):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, **kwargs)


def heads(length, batch=1, queries=1, seed=0):
    """q `[batch, 4, queries, 64]`, k and v `[batch, 2, length, 64]`."""
    return (
        normal(batch, 4, queries, 64, seed=seed),
        normal(batch, 2, length, 64, seed=seed + 1),
        normal(batch, 2, length, 64, seed=seed + 2),
    )


def first_starts(call, counts):
    """The counts where the first row of `call(count)` has other bits than at the count before."""
    counts = list(counts)
    rows = [raw(call(count)[0]) for count in counts]
    return [counts[i] for i in range(1, len(counts)) if rows[i] != rows[i - 1]]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [(M1, [6]), (M1_ULTRA, [12]), (M3, [2, 13]), (M5, [2, 13]), (CUDA, [8])],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_row_of_a_quantised_product_changes_bits_where_its_class_changes(profile, expected):
    x, weight = normal(16, WIDTH), quantized(OUTPUTS, WIDTH)
    with adversarial(profile) as seen:
        assert first_starts(lambda rows: project(x[:rows], weight), range(1, 17)) == expected
        assert len(seen.kernels("quantized_matmul", n=OUTPUTS, k=WIDTH)) == len(expected) + 1


@ALL
def test_rows_of_one_class_have_their_bits_whatever_the_other_rows_are(profile):
    # 2 to 5 rows are one class everywhere.
    x, others, weight = normal(5, WIDTH), normal(5, WIDTH, seed=1), quantized(OUTPUTS, WIDTH)
    with adversarial(profile):
        alone = project(x[:2], weight)
        mixed = project(mx.concatenate([others[:3], x[:2]]), weight)
        in_a_batch = project(x[:2, None], weight)[:, 0]
        with_nans = project(mx.concatenate([x[:2], others[:1] * mx.nan]), weight)
    assert raw(alone) == raw(mixed[3:]) == raw(in_a_batch) == raw(with_nans[:2])


@ALL
def test_a_naive_batch_differs_from_its_rows_alone(profile):
    batch = 12 if profile is M1_ULTRA else 8
    x, weight = normal(batch, WIDTH), quantized(OUTPUTS, WIDTH)

    def rows_equal():
        alone = mx.concatenate([project(x[i : i + 1], weight) for i in range(batch)])
        return [raw(a) == raw(b) for a, b in zip(alone, project(x, weight), strict=True)]

    assert all(rows_equal())
    with adversarial(profile):
        assert not any(rows_equal())


@ALL
def test_rows_through_a_3d_weight_equal_one_row_except_on_cuda(profile):
    x, weight = normal(8, WIDTH), quantized(OUTPUTS, WIDTH)
    batched = [part[None] for part in weight]
    with adversarial(profile):
        alone, rows = project(x[:1], weight), project(x[:, None], batched)[:, 0]
    assert (raw(alone[0]) == raw(rows[0])) is (profile is not CUDA)


@ALL
def test_unsorted_pairs_change_bits_on_cuda_at_eight_and_nowhere_else(profile):
    x, weight = normal(20, WIDTH), quantized(16, 128, WIDTH)
    experts = [3, 0, 7, 1, 15, 2, 2, 9, 11, 4] * 2
    with adversarial(profile) as seen:
        found = first_starts(lambda n: gather(x[:n], weight, experts[:n]), range(1, 21))
        assert len(seen.kernels("gather_qmm")) == len(found) + 1
    assert found == ([8] if profile is CUDA else [])


@ALL
def test_sorted_pairs_change_bits_where_the_grouped_kernel_begins(profile):
    x, weight = normal(20, WIDTH), quantized(4, 128, WIDTH)
    experts = sorted([0, 1, 2, 3] * 5)
    with adversarial(profile):
        unsorted, grouped = (
            gather(x[:16], weight, experts[:16], is_sorted=flag) for flag in (False, True)
        )
        below = [gather(x[:15], weight, experts[:15], is_sorted=flag) for flag in (False, True)]
    assert raw(unsorted[0]) != raw(grouped[0])
    assert raw(below[0]) == raw(below[1])


@ALL
def test_one_pair_has_the_bits_of_one_row(profile):
    x, stack = normal(1, WIDTH), quantized(4, 128, WIDTH)
    with adversarial(profile):
        pair, row = gather(x, stack, [2]), project(x, [part[2] for part in stack])
    assert raw(pair) == raw(row)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (M1, [*range(2, 9)]),
        (M1_ULTRA, [*range(2, 9)]),
        (M3, [2, 6]),
        (M5, [2, 6]),
        (CUDA, [*range(2, 9)]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("form", ["matmul", "@", "@=", "addmm"])
def test_a_row_of_a_dense_product_changes_bits_where_its_class_changes(profile, expected, form):
    x, weight, bias = normal(8, WIDTH), normal(WIDTH, WIDTH, seed=1), normal(WIDTH, seed=2)

    def product(rows):
        part = x[:rows]
        if form == "matmul":
            return mx.matmul(part, weight.T)
        if form == "addmm":
            return mx.addmm(bias, part, weight.T)
        if form == "@=":
            part @= weight.T
            return part
        return part @ weight.T

    with adversarial(profile):
        assert first_starts(product, range(1, 9)) == expected


@ALL
def test_a_dense_weight_takes_a_batch_as_rows(profile):
    x, weight = normal(4, WIDTH), normal(WIDTH, 64, seed=1)
    with adversarial(profile):
        rows, batch, broadcast = x @ weight, x[:, None] @ weight, x[:, None] @ weight[None]
    assert raw(rows) == raw(batch) == raw(broadcast)


@ALL
def test_gathered_dense_pairs_have_the_same_bits_in_any_number(profile):
    x, weight = normal(9, 1, WIDTH), normal(4, WIDTH, 64, seed=1)
    experts = mx.array([1, 3, 0, 0, 2, 1, 1, 3, 2])

    def pairs(count, **kwargs):
        return mx.gather_mm(x[:count], weight, rhs_indices=experts[:count], **kwargs)

    with adversarial(profile):
        assert first_starts(pairs, range(1, 10)) == []
        assert raw(pairs(9)[0]) != raw(pairs(9, sorted_indices=True)[0])


@pytest.mark.parametrize(
    ("profile", "boundary"),
    [(M1, 512), (M3, 512), (M1_ULTRA, 128), (M5, 128)],
    ids=lambda value: getattr(value, "name", None),
)
def test_padding_the_keys_past_a_boundary_changes_bits(profile, boundary):
    q, k, v = heads(boundary + 8)
    length = boundary - 8

    def padded(to):
        mask = (mx.arange(to) < length)[None, None, None]
        return raw(attend(q, k[:, :, :to], v[:, :, :to], mask=mask))

    with adversarial(profile) as seen:
        exact = raw(attend(q, k[:, :, :length], v[:, :, :length]))
        assert padded(boundary - 1) == exact
        assert padded(boundary + 8) != exact
        assert len(seen.kernels("scaled_dot_product_attention")) == 2


@pytest.mark.parametrize("profile", [M1, M3, M1_ULTRA, M5], ids=lambda profile: profile.name)
def test_left_padding_changes_bits_unless_it_deals_the_keys_as_before(profile):
    q, k, v = heads(40)

    def padded(by):
        padding = [(0, 0), (0, 0), (by, 0), (0, 0)]
        mask = (mx.arange(40 + by) >= by)[None, None, None]
        return raw(attend(q, mx.pad(k, padding), mx.pad(v, padding), mask=mask))

    with adversarial(profile):
        exact = raw(attend(q, k, v))
        assert all(padded(by) != exact for by in (1, 3, 7, 31))
        assert padded(32) == exact


@ALL
def test_attention_of_a_batch_equals_its_sequences_except_on_cuda(profile):
    q, k, v = heads(50, batch=3)
    with adversarial(profile):
        together, alone = attend(q, k, v), attend(q[1:2], k[1:2], v[1:2])
    assert (raw(together[1]) == raw(alone[0])) is (profile is not CUDA)


@ALL
def test_attention_of_many_queries_differs_from_one_query(profile):
    q, k, v = heads(30, queries=16)
    with adversarial(profile):
        many, last = attend(q, k, v, mask="causal"), attend(q[:, :, -1:], k, v)
    assert raw(many[:, :, -1:]) != raw(last)


@ALL
def test_a_convolution_of_a_batch_differs_on_cuda_only(profile):
    x, weight = normal(3, 8, 512), normal(512, 4, 1, seed=1)
    with adversarial(profile):
        together, alone = (mx.conv1d(part, weight, groups=512) for part in (x, x[:1]))
    assert (raw(together[0]) == raw(alone[0])) is (profile is not CUDA)


@ALL
def test_values_stay_right_to_rounding(profile):
    x, weight, stack = normal(9, WIDTH), quantized(OUTPUTS, WIDTH), quantized(4, 128, WIDTH)
    dense, bias, taps = normal(WIDTH, 64), normal(64), normal(64, 4, 1)
    qkv, additive = heads(30, batch=2, queries=5), normal(2, 1, 5, 30)
    experts = [0, 1, 2, 3, 3, 3, 0, 1, 2]
    calls = [
        lambda: project(x, weight),
        lambda: project(x[:, None], [part[None] for part in weight]),
        lambda: mx.quantized_matmul(normal(3, OUTPUTS), *weight, transpose=False, group_size=64),
        lambda: gather(x, stack, experts),
        lambda: mx.gather_mm(x[:, None], dense[None], rhs_indices=mx.zeros(9, mx.uint32)),
        lambda: x @ dense,
        lambda: mx.matmul(x[0], dense),
        lambda: mx.addmm(bias, x, dense, alpha=0.5, beta=2.0),
        lambda: mx.conv1d(normal(2, 9, 64), taps, groups=64),
        lambda: attend(*qkv),
        lambda: attend(*qkv, mask="causal"),
        lambda: attend(*qkv, mask=additive),
        lambda: attend(*qkv, mask=additive > -1),
    ]
    plain = [np.array(call()) for call in calls]
    with adversarial(profile):
        for call, expected in zip(calls, plain, strict=True):
            # f32 sums of at most 1024 terms of order 1, in another order.
            np.testing.assert_allclose(np.array(call()), expected, rtol=1e-4, atol=1e-4)


def patched_functions():
    names = ("quantized_matmul", "gather_qmm", "gather_mm", "matmul", "addmm", "conv1d", *REFUSED)
    operators = [vars(mx.array)[name] for name in ("__matmul__", "__imatmul__")]
    functions = [getattr(mx, name) for name in names]
    return [*functions, *operators, mx.fast.scaled_dot_product_attention]


def test_everything_is_put_back_after_an_error():
    before = patched_functions()

    def fail():
        assert all(a is not b for a, b in zip(patched_functions(), before, strict=True))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), adversarial(M3):
        fail()
    assert all(a is b for a, b in zip(patched_functions(), before, strict=True))
    with adversarial(CUDA):
        pass


def test_a_second_profile_is_refused_and_leaves_the_first_in_force():
    x, weight = normal(8, WIDTH), quantized(OUTPUTS, WIDTH)
    with adversarial(CUDA):
        eight = raw(project(x, weight)[0])
        for profile in (CUDA, M1):
            with pytest.raises(RuntimeError, match="patched already"), adversarial(profile):
                pass
        assert raw(project(x, weight)[0]) == eight != raw(project(x[:1], weight)[0])
    assert raw(project(x, weight)[0]) == raw(project(x[:1], weight)[0])


@ALL
def test_another_thread_gets_the_same_bits(profile):
    x, weight = normal(1, WIDTH), quantized(OUTPUTS, WIDTH)
    dense, qkv = normal(WIDTH, 64), heads(30)
    outputs = []

    def work():
        outputs.append([raw(a) for a in (project(x, weight), x @ dense, attend(*qkv))])

    with adversarial(profile) as seen:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        # Else this thread would be served from what the other one looked up.
        seen.clear()
        work()
    work()
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_compiled_function_carries_no_profile_in_or_out():
    x, weight = normal(8, WIDTH), normal(WIDTH, 64)
    compiled = mx.compile(lambda x: mx.matmul(x, weight))
    plain = raw(compiled(x))
    with adversarial(M1):
        assert raw(compiled(x)) == raw(mx.matmul(x, weight)) != plain
    assert raw(compiled(x)) == plain


@pytest.mark.parametrize("name", REFUSED)
def test_a_product_without_a_model_is_refused(name):
    with adversarial(M1), pytest.raises(NotImplementedError, match=name):
        getattr(mx, name)(mx.zeros(4), mx.zeros(4))


def test_the_calls_seen_are_listed_by_function_and_weight_and_can_be_forgotten():
    x, narrow, wide = normal(9, WIDTH), quantized(64, WIDTH), quantized(OUTPUTS, WIDTH)
    with adversarial(CUDA) as seen:
        for rows in (1, 7, 7, 8):
            project(x[:rows], wide)
        project(x[:2], narrow)
        assert [c.problem.rows for c in seen.calls("quantized_matmul")] == [1, 7, 8, 2]
        assert seen.kernels("quantized_matmul", n=OUTPUTS) == {("qmv",), ("qmm_sm80",)}
        assert seen.kernels("quantized_matmul", n=64, k=WIDTH) == {("qmv",)}
        assert seen.kernels("gather_qmm") == set()
        seen.clear()
        assert seen.calls() == []
        project(x[:1], wide)
        assert len(seen.calls()) == 1


def test_scale_one_takes_shapes_as_they_are():
    # 256 by 256 is far below the smallest limits, 2048 by 8192 is not.
    x, weight = normal(8, WIDTH), quantized(OUTPUTS, WIDTH)
    with adversarial(M1, scale=1):
        assert first_starts(lambda rows: project(x[:rows], weight), range(1, 9)) == []
