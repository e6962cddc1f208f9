"""Stock mlx-lm, batched and alone: equal on a plain CPU, not under any profile."""

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.adversarial import adversarial
from tests.dispatch import PROFILES
from tests.tree import ROOT

CHECKPOINT = ROOT / "qwisp" / "models" / "tiny"
PROMPTS = ([*range(300, 304)], [*range(400, 409)])
STEPS = 2


@pytest.fixture(scope="module")
def model():
    return load_model(CHECKPOINT)[0]


def raw(logprobs):
    return bytes(memoryview(logprobs))


def alone(model, prompt):
    """The bytes of each step's logprobs of one prompt."""
    cache = make_prompt_cache(model)
    model(mx.array(prompt[:-1])[None], cache=cache)
    token, steps = mx.array(prompt[-1:]), []
    for _ in range(STEPS):
        logits = model(token[None], cache=cache)[:, -1]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = mx.argmax(logprobs, axis=-1)
        steps.append(raw(logprobs))
    return steps


def batched(model, prompts):
    """The bytes of each step's logprobs of every prompt, generated together."""
    generator = BatchGenerator(model, max_tokens=STEPS)
    uids = generator.insert(list(prompts))
    steps = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            steps[response.uid].append(raw(response.logprobs))
    return [steps[uid] for uid in uids]


def test_a_batch_equals_its_prompts_alone_on_a_plain_cpu(model):
    assert batched(model, PROMPTS) == [alone(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_batch_differs_from_its_prompts_alone_under_every_profile(model, profile):
    with adversarial(profile):
        solo = [alone(model, prompt) for prompt in PROMPTS]
        assert alone(model, PROMPTS[0]) == solo[0]
        assert batched(model, PROMPTS) != solo
