"""Tokens are drawn as the parameters say, from a generator that nothing else shares."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qwisp.config import SamplingParams
from qwisp.engine.sampling import Sampler, filter_logits

EVERY_FILTER = SamplingParams(temperature=0.8, top_k=7, top_p=0.95, min_p=0.02, seed=3)
SAMPLED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_k=3),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=2.0, min_p=0.3),
    EVERY_FILTER,
]
ALL = [SamplingParams(), *SAMPLED]


def row(*logits: float) -> mx.array:
    return mx.array(logits, dtype=mx.float32)


def kept(logits: mx.array, params: SamplingParams) -> list[int]:
    return np.flatnonzero(np.array(filter_logits(logits, params)) > -np.inf).tolist()


def draw(params: SamplingParams, logits: mx.array, count: int) -> list[int]:
    sampler = Sampler(params)
    return [sampler.next(logits).item() for _ in range(count)]


def reference_kept(logits: np.ndarray, params: SamplingParams) -> list[int] | None:
    """The filters in f64 with a stable sort; None where f32 may round a border either way."""
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    ids = np.argsort(-scaled, kind="stable")[: params.top_k or None]
    mass = np.exp(scaled[ids])
    before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
    if params.top_p < 1.0:
        border = params.top_p * mass.sum()
        if np.abs(before - border).min() < 1e-4 * mass.sum():
            return None
        ids, mass = ids[before < border], mass[before < border]
    if params.min_p > 0.0 and np.abs(mass - params.min_p).min() < 1e-4:
        return None
    return sorted(ids[mass >= params.min_p].tolist())


@given(
    st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=40),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
        top_k=st.integers(0, 45),
        top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
        min_p=st.sampled_from([0.0, 0.03, 0.3, 0.9]),
    ),
)
@settings(max_examples=300)
def test_the_filters_keep_what_the_reference_keeps(logits, params):
    reference = reference_kept(np.array(logits, dtype=np.float32), params)
    assume(reference is not None)
    assert kept(row(*logits), params) == reference


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 3}, [1, 2, 4]),
        ({"top_k": 4}, [0, 1, 2, 4]),
        ({"top_k": 6}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 99}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_top_k_keeps_exactly_k_and_of_equal_tokens_the_lower_ids(params, expected):
    assert kept(row(1, 3, 3, 0, 3, 1), SamplingParams(temperature=1.0, **params)) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.2, [0]),
        (0.25, [0]),
        (0.2501, [0, 1]),
        (0.5, [0, 1]),
        (0.75, [0, 1, 2]),
        (0.76, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it_and_of_equal_tokens_the_lower_ids(
    top_p, expected
):
    # Four tokens of probability 1/4: every sum is exact.
    assert kept(row(2, 2, 2, 2), SamplingParams(temperature=1.0, top_p=top_p)) == expected


def test_top_p_counts_the_mass_that_top_k_left():
    # Of the two that top_k leaves each has 1/2, which reaches top_p alone; of all four it has 1/4.
    assert kept(row(2, 2, 2, 2), SamplingParams(temperature=1.0, top_k=2, top_p=0.5)) == [0]


def test_top_p_counts_the_mass_before_min_p():
    # One token of mass 1, eight of 1/8. By top_p the first has 1/2 and two more make 0.6; had min_p
    # dropped the eight before, the first would have all.
    logits = row(0, *[-np.log(8.0)] * 8)
    assert kept(logits, SamplingParams(temperature=1.0, top_p=0.6)) == [0, 1, 2]
    assert kept(logits, SamplingParams(temperature=1.0, top_p=0.6, min_p=0.12)) == [0, 1, 2]
    # Were min_p first, only masses 1 and 1/2 would be left, and the first alone has 0.6 of them.
    halves = row(0, -np.log(2.0), *[-np.log(8.0)] * 8)
    assert kept(halves, SamplingParams(temperature=1.0, top_p=0.6, min_p=0.13)) == [0, 1]


def test_min_p_keeps_equally_likely_tokens_alike_and_its_border():
    assert kept(row(3, 1, 3, 2), SamplingParams(temperature=1.0, min_p=1.0)) == [0, 2]
    share = float(mx.exp(row(-1.0)).item())  # exact in f32, and so in f64
    assert kept(row(3, 2, 1.9), SamplingParams(temperature=1.0, min_p=share)) == [0, 1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9, 100.0])
@pytest.mark.parametrize(
    "extreme", [{"top_p": 1e-300}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9, "min_p": 1.0}]
)
def test_the_likeliest_token_always_stays(temperature, extreme):
    params = SamplingParams(temperature=temperature, **extreme)
    for logits in (row(-5, 7, 1), row(1e38, -3e38, 3e38), row(-np.inf, -1e-30, -np.inf), row(4.0)):
        best = int(mx.argmax(logits).item())
        assert kept(logits, params) == [best]
        assert draw(params, logits, 3) == [best] * 3


def test_temperature_divides_the_logits():
    result = filter_logits(row(1, 2, 4), SamplingParams(temperature=2.0))
    assert result.tolist() == [-1.5, -1.0, 0.0]


@pytest.mark.parametrize("params", SAMPLED, ids=str)
def test_tokens_are_drawn_with_the_probabilities_of_the_reference(params):
    logits = np.array([0.3, 2.0, -1.0, 1.5, 1.5, 0.0, -8.0, 0.9, 1.1, -0.2], dtype=np.float32)
    ids = reference_kept(logits, params)
    weights = np.exp(logits[ids].astype(np.float64) / params.temperature)
    num_draws = 1500
    counts = np.bincount(draw(params, mx.array(logits), num_draws), minlength=len(logits))
    assert counts.sum() == counts[ids].sum() == num_draws
    expected = num_draws * weights / weights.sum()
    chi_squared = float(((counts[ids] - expected) ** 2 / expected).sum())
    # Mean len(ids) - 1; with fixed seeds this is one fixed draw, not a chance to fail.
    assert chi_squared < len(ids) - 1 + 3 * np.sqrt(2 * len(ids))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 1000, 40_000])
def test_greedy_takes_the_largest_logit_and_of_equal_ones_the_lowest_id(dtype, vocab_size):
    for ties in ([vocab_size - 1], [vocab_size - 2, vocab_size - 1], [2, vocab_size // 2, 3]):
        logits = np.full(vocab_size, -3.0, dtype=np.float32)
        logits[ties] = 1.5
        token = Sampler(SamplingParams()).next(mx.array(logits).astype(dtype))
        assert token.item() == min(ties)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_arithmetic_is_f32_for_every_dtype(dtype):
    logits = mx.array(np.random.default_rng(5).normal(size=500)).astype(dtype)
    result = filter_logits(logits, EVERY_FILTER)
    assert result.dtype == mx.float32
    assert mx.array_equal(result, filter_logits(logits.astype(mx.float32), EVERY_FILTER)).item()
    assert draw(EVERY_FILTER, logits, 20) == draw(EVERY_FILTER, logits.astype(mx.float32), 20)


@pytest.mark.parametrize("params", ALL, ids=str)
def test_the_token_is_a_uint32_scalar_that_no_host_read_was_needed_for(params):
    sampler = Sampler(params)

    def step(logits: mx.array, key: mx.array) -> mx.array:
        sampler._key = key
        return sampler.next(logits)

    # Inside a trace MLX refuses to evaluate anything that depends on an input.
    token = mx.compile(step)(row(*range(20)), mx.random.key(1))
    assert (token.dtype, token.shape) == (mx.uint32, ())


@pytest.mark.parametrize("params", [*ALL[:2], SAMPLED[3]], ids=str)
def test_nothing_is_sorted_unless_a_filter_needs_it(params, monkeypatch):
    for name in ("sort", "argsort", "partition", "argpartition", "topk"):
        monkeypatch.delattr(mx, name)
    draw(params, row(*range(20)), 2)


LOGITS = mx.array(np.random.default_rng(1).normal(size=300).astype(np.float32))


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others():
    params = [SamplingParams(temperature=1.5, seed=seed) for seed in (0, 1, 2**32, 2**64 - 1)]
    tokens = [draw(p, LOGITS, 30) for p in params]
    assert tokens == [draw(p, LOGITS, 30) for p in params]
    assert len({tuple(drawn) for drawn in tokens}) == len(params)


def test_two_samplers_do_not_change_each_other_in_any_interleaving():
    first, second = EVERY_FILTER, SamplingParams(temperature=1.5, seed=3)
    alone = {0: draw(first, LOGITS, 12), 1: draw(second, LOGITS, 12)}
    for order in ([0, 1] * 12, [0] * 12 + [1] * 12, [1, 1, 0] * 6 + [0] * 6):
        samplers = {0: Sampler(first), 1: Sampler(second)}
        tokens: dict[int, list[int]] = {0: [], 1: []}
        for who in order:
            tokens[who].append(samplers[who].next(LOGITS).item())
        assert tokens == alone


def test_the_global_generator_is_neither_read_nor_moved():
    mx.random.seed(11)
    undisturbed = mx.random.uniform(shape=(8,)).tolist()
    expected = draw(EVERY_FILTER, LOGITS, 10)
    mx.random.seed(11)
    assert draw(EVERY_FILTER, LOGITS, 10) == expected
    assert mx.random.uniform(shape=(8,)).tolist() == undisturbed


@pytest.mark.parametrize("params", ALL, ids=str)
@pytest.mark.parametrize("position", [0, 1, 517, 999])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_shows_in_its_maximum_and_gives_an_id_in_range(
    params, position, value
):
    logits = np.random.default_rng(2).normal(size=1000).astype(np.float32)
    logits[position] = value
    assert not np.isfinite(mx.max(mx.array(logits)).item())
    # A step that was launched ahead looks this id up in the embedding before the host refuses it.
    assert 0 <= Sampler(params).next(mx.array(logits)).item() < 1000


def test_a_token_that_the_model_excludes_is_never_drawn():
    logits = mx.where(mx.arange(300) % 3 == 0, LOGITS, -mx.inf)
    assert all(token % 3 == 0 for token in draw(SamplingParams(temperature=50.0), logits, 300))


def test_memory_stays_flat_over_many_tokens():
    sampler = Sampler(EVERY_FILTER)
    sizes = []
    for _ in range(600):
        mx.eval(sampler.next(LOGITS))
        sizes.append(mx.get_active_memory())
    assert sizes[-1] <= sizes[50]
