from dataclasses import replace

import pytest

from qwisp.bench.exactness import check_exactness
from qwisp.types import Completion, Timings

TRUE = Completion(
    token_ids=(5, 6, 7),
    text="abc",
    finish_reason="length",
    error=None,
    prompt_tokens=2,
    timings=Timings(),
    numerics_digest="n" * 64,
    logits_digests=("a" * 64, "b" * 64, "c" * 64),
)
REFERENCE = {"first": TRUE, "second": TRUE}


def recorded_with(**changes):
    """A run that equals the reference but for one prompt."""
    return {"first": TRUE, "second": replace(TRUE, **changes)}


def test_equal_runs_are_exact_and_say_how_much_was_compared():
    found = check_exactness(REFERENCE, dict(REFERENCE), [dict(REFERENCE)])
    assert found.is_exact
    assert not found.is_reference
    assert found.tokens_compared == 6
    assert found.differences == ()


@pytest.mark.parametrize(
    ("changes", "token_idx", "words"),
    [
        ({"logits_digests": ("a" * 64, "b" * 64, "x" * 64)}, 2, "logits bytes differ"),
        ({"token_ids": (5, 6, 8)}, 2, "token 8 instead of 7"),
        ({"finish_reason": "stop"}, None, "ended by stop"),
        ({"numerics_digest": "m" * 64}, None, "numerics"),
        ({"logits_digests": ()}, None, "recorded 0 logits rows"),
        (
            {"token_ids": (5, 6), "logits_digests": ("a" * 64, "b" * 64)},
            None,
            "after 2 tokens instead of by length after 3",
        ),
    ],
)
def test_a_difference_in_one_prompt_is_found_and_named(changes, token_idx, words):
    found = check_exactness(REFERENCE, recorded_with(**changes), [])
    assert not found.is_exact
    (difference,) = found.differences
    assert difference.prompt == "second"
    assert difference.token_idx == token_idx
    assert words in difference.what


def test_a_reference_that_recorded_no_logits_proves_nothing():
    empty = {"first": replace(TRUE, logits_digests=())}
    found = check_exactness(empty, empty, [])
    assert not found.is_exact
    assert "the reference recorded 0 logits rows" in found.differences[0].what


@pytest.mark.parametrize("recorded", [dict(REFERENCE), None])
def test_a_timed_trial_with_another_token_is_found(recorded):
    timed = [dict(REFERENCE), recorded_with(token_ids=(5, 9, 7), logits_digests=())]
    found = check_exactness(REFERENCE, recorded, timed)
    assert not found.is_exact
    assert found.differences[0].what == "timed trial: token 9 instead of 6"
    assert found.differences[0].token_idx == 1
