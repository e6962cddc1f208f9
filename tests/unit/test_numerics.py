"""The record of rules: its digest, its row tiles, and what each device gets."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwisp.errors import ConfigError, DeviceError
from qwisp.kernels.numerics import Numerics, rules_for

DEVICES = ["cpu", "cuda", "metal-applegpu_g13g", "metal-applegpu_g15s", "metal-applegpu_g17d"]


def _rules(device: str = "cpu") -> Numerics:
    return rules_for(device, dtype="float32", prefill_chunk=2048)


def test_every_field_changes_the_digest() -> None:
    rules = _rules()
    others = {
        "device": "cuda",
        "mlx_version": "0",
        "dtype": "bfloat16",
        "prefill_chunk": 1024,
        "attention_tile": 64,
        "linear_rows": (2, 5),
        "dense_rows_max": 1,
        "gather_pairs_min": 8,
        "expert_major_tokens": 16,
        "recipe": 0,
    }
    assert set(others) == {field.name for field in dataclasses.fields(rules)}
    digests = {dataclasses.replace(rules, **{k: v}).digest for k, v in others.items()}
    assert len(digests | {rules.digest}) == len(others) + 1
    assert _rules().digest == rules.digest


@given(st.integers(1, 5), st.integers(0, 20), st.integers(1, 100))
def test_row_tiles_cover_all_rows_within_the_limits(low: int, more: int, num_rows: int) -> None:
    high = 2 * low - 1 + more
    tiles = dataclasses.replace(_rules(), linear_rows=(low, high)).row_tiles(num_rows)
    assert [tile[0] for tile in tiles] == [0, *(tile[1] for tile in tiles[:-1])]
    assert tiles[-1][1] == num_rows
    assert all(stop - start <= high for start, stop in tiles)
    assert all(stop - start >= low for start, stop in tiles) or num_rows < low


@pytest.mark.parametrize("device", DEVICES)
def test_gpu_rules_stay_below_the_smallest_kernel_limit(device: str) -> None:
    rules = _rules(device)
    if device == "cpu":
        return
    assert rules.dense_rows_max == 1
    assert rules.linear_rows[1] < (8 if device == "cuda" else 6)
    assert rules.gather_pairs_min == (8 if device == "cuda" else 1)


def test_m3_and_later_never_run_a_lone_row() -> None:
    assert _rules("metal-applegpu_g14s").linear_rows[0] == 1
    assert _rules("metal-applegpu_g15g").linear_rows[0] == 2


def test_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match="'rocm'"):
        _rules("rocm")


@pytest.mark.parametrize(
    "bad",
    [
        {"prefill_chunk": 0},
        {"attention_tile": 0},
        {"linear_rows": (0, 3)},
        {"linear_rows": (3, 4)},
        {"dense_rows_max": 0},
        {"gather_pairs_min": 0},
        {"expert_major_tokens": 0},
    ],
)
def test_impossible_rules_are_refused(bad: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        dataclasses.replace(_rules(), **bad)
