"""L1 confirmed on the embedded model: real routing, eight layers, the trained tokenizer."""

import contextlib

import pytest

from qwisp.engine.loading import EMBEDDED_MODEL
from qwisp.engine.tokenizer import Tokenizer
from tests.adversarial import adversarial
from tests.dispatch import PROFILES, Profile
from tests.l1 import rules_of, serve

DEVICES: tuple[Profile | None, ...] = (None, *PROFILES)
NAMES = ["plain" if device is None else device.name for device in DEVICES]
TEXTS = (
    "import os\n\nclass Node:\n",
    "Chapter I. It was a dark night, and the wind came from the sea over the low stone walls of "
    "the village, so that nobody heard the horse",
)


def _prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.load(EMBEDDED_MODEL, (), 8192)
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_L1_on_the_embedded_model(device: Profile | None) -> None:
    prompts, limits = _prompts(), (10, 10)
    context = contextlib.nullcontext() if device is None else adversarial(device)
    with context:
        expected = serve(None, rules_of(device), 64, prompts, limits)
        for capacity in (8, 24):
            assert serve(None, rules_of(device), capacity, prompts, limits) == expected


def test_L1_over_512_tokens_of_the_embedded_model() -> None:
    prompts = _prompts()[:1]
    (expected,) = serve(None, rules_of(None), 64, prompts, (512,))
    (outcome,) = serve(None, rules_of(None), 8, prompts, (512,))
    assert len(expected.token_ids) == 512
    assert outcome == expected
