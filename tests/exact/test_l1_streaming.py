"""L1: a request has the same bytes of logits at every capacity, plain and on every modelled device.

Each claim comes with twins that break one rule of design section 1 on purpose; a twin that no
device notices would mean that the test could not fail.
"""

import contextlib
import dataclasses
import json
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import qwisp.engine.moe as moe
from qwisp.kernels.experts import combine, expert_rows, place
from tests.adversarial import adversarial
from tests.dispatch import CUDA, PROFILES, Profile
from tests.l1 import Outcome, decode_lanes, load, rules_of, serve
from tests.synthetic import make_checkpoint

CAPACITIES = (8, 9, 12, 16, 32)
ALL_EXPERTS = 64
DEVICES: tuple[Profile | None, ...] = (None, *PROFILES)
NAMES = ["plain" if device is None else device.name for device in DEVICES]

PROMPT_LENS = (1, 2, 7, 33, 150, 700)
MAX_TOKENS = (520, 6, 6, 6, 6, 6)
"""The shortest prompt generates longest: differences that 48 tokens hide have shown at 300."""
SHORT_TOKENS = (24, *MAX_TOKENS[1:])


@pytest.fixture(scope="module")
def two_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(
        tmp_path_factory.mktemp("two-layer"),
        "qwen3_5_moe",
        seed=11,
        layers=2,
        hidden=64,
        experts=ALL_EXPERTS,
        top_k=8,
        vocab=512,
    )
    # Without an end of text every request generates all it was asked for.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return folder


def _prompts(lens: tuple[int, ...], vocab: int = 512, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lens]


def _on(device: Profile | None):
    return contextlib.nullcontext() if device is None else adversarial(device)


def _first_difference(a: Outcome, b: Outcome) -> int | None:
    pairs = zip(a.digests, b.digests, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), None)


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_L1_streamed_equals_resident_at_every_capacity(
    device: Profile | None, two_layer: Path
) -> None:
    rules = rules_of(device, prefill_chunk=256)
    prompts = _prompts(PROMPT_LENS)
    with _on(device):
        reference = serve(two_layer, rules, ALL_EXPERTS, prompts, MAX_TOKENS)
        assert len(reference[0].token_ids) == MAX_TOKENS[0]
        for capacity in CAPACITIES:
            # On a modelled device the long run is at the smallest capacity, where nearly every
            # step of a batch is split; the others repeat its beginning.
            is_long = device is None or capacity == min(CAPACITIES)
            limits = MAX_TOKENS if is_long else SHORT_TOKENS
            outcomes = serve(two_layer, rules, capacity, prompts, limits)
            for expected, outcome, limit in zip(reference, outcomes, limits, strict=True):
                where = _first_difference(expected, outcome)
                assert where is None, f"C={capacity}, limit {limit}: token {where} differs"
                assert outcome.token_ids == expected.token_ids[:limit]


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_L1_rows_of_one_to_eight_lanes_equal_their_solo_runs(
    device: Profile | None, two_layer: Path
) -> None:
    rules = rules_of(device)
    prompts = _prompts((3, 40, 1, 17, 5, 130, 9, 2))
    with _on(device):
        loaded = load(two_layer, rules, 12)
        solo = [decode_lanes(loaded, [prompt], 12)[0] for prompt in prompts]
        for num_lanes in (2, 3, 4, 5, 6, 7, 8):
            together = decode_lanes(loaded, prompts[:num_lanes], 12)
            assert together == solo[:num_lanes], f"{num_lanes} lanes"
        loaded.arena.check()
        loaded.arena.close()


@pytest.mark.parametrize("device", PROFILES, ids=NAMES[1:])
def test_twin_that_batches_rows_without_tiles_is_caught(device: Profile, two_layer: Path) -> None:
    naive = dataclasses.replace(rules_of(device), linear_rows=(1, 1 << 20))
    prompts = _prompts((3, 1, 5, 2) * 9)
    with adversarial(device):
        loaded = load(two_layer, naive, ALL_EXPERTS)
        solo = [decode_lanes(loaded, [prompt], 2)[0] for prompt in prompts]
        # An Ultra keeps its vector kernels up to 31 rows of matrices as small as these.
        assert decode_lanes(loaded, prompts, 2) != solo


def test_twin_that_does_not_pad_pairs_is_caught_on_cuda(two_layer: Path) -> None:
    naive = dataclasses.replace(rules_of(CUDA), gather_pairs_min=1)
    prompts, limits = _prompts((2, 12)), (6, 6)
    with adversarial(CUDA):
        loaded = load(two_layer, naive, ALL_EXPERTS)
        solo = [decode_lanes(loaded, [prompt], 6)[0] for prompt in prompts]
        split = load(two_layer, naive, 8)
        # Two lanes have up to 16 experts: at C=8 a pass of a few pairs falls below 8.
        assert decode_lanes(split, prompts, 6) != solo
        padded = load(two_layer, rules_of(CUDA), 8)
        assert decode_lanes(padded, prompts, 6) == [
            list(outcome.digests)
            for outcome in serve(two_layer, rules_of(CUDA), ALL_EXPERTS, prompts, limits)
        ]


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_twin_that_adds_up_pass_by_pass_is_caught(
    device: Profile | None, two_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A naive split sums each pass over its experts, then the passes: another order of addition."""
    rules = rules_of(device)
    prompts, limits = _prompts((20,)), (4,)

    def keep_apart(outputs: list[mx.array], places: list[np.ndarray]) -> list[mx.array]:
        num_places = sum(map(len, places))
        apart = []
        for output, where in zip(outputs, places, strict=True):
            rest = np.setdiff1d(np.arange(num_places, dtype=np.int32), where)
            zeros = mx.zeros((len(rest), output.shape[1]))
            apart.append(place([output, zeros], [where, rest]))
        return apart

    def add_pass_by_pass(apart: list[mx.array] | mx.array, scores: mx.array) -> mx.array:
        if isinstance(apart, mx.array):
            return combine(apart, scores)
        return sum((combine(each, scores) for each in apart[1:]), combine(apart[0], scores))

    with _on(device):
        expected = serve(two_layer, rules, ALL_EXPERTS, prompts, limits)
        assert serve(two_layer, rules, 8, prompts, limits) == expected
        monkeypatch.setattr(moe, "place", keep_apart)
        monkeypatch.setattr(moe, "combine", add_pass_by_pass)
        assert serve(two_layer, rules, 8, prompts, limits) != expected


@pytest.mark.parametrize("device", PROFILES, ids=NAMES[1:])
def test_twin_that_splits_the_rows_of_one_expert_is_caught(
    device: Profile, two_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one expert in two calls: each call may take another kernel than the whole."""
    rules = rules_of(device)
    prompts, limits = _prompts((400,)), (2,)

    def split_rows(x: mx.array, slot: int, bank: object, numerics: object) -> mx.array:
        if x.shape[0] < 3:
            return expert_rows(x, slot, bank, numerics)
        parts = (x[:1], x[1:])
        return mx.concatenate([expert_rows(part, slot, bank, numerics) for part in parts])

    with adversarial(device):
        expected = serve(two_layer, rules, 16, prompts, limits)
        monkeypatch.setattr(moe, "expert_rows", split_rows)
        assert serve(two_layer, rules, 16, prompts, limits) != expected
