"""Runs of the promise L1: the same request under other circumstances, compared by bytes of
logits."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from qwisp import Engine, EngineConfig
from qwisp.engine.loading import LoadedModel, load_model
from qwisp.kernels.numerics import Numerics, rules_for
from qwisp.types import Request
from tests.dispatch import AppleGPU, Profile


@dataclass(frozen=True)
class Outcome:
    """Token ids and one digest of the logits row per generated token."""

    token_ids: tuple[int, ...]
    digests: tuple[str, ...]


def rules_of(profile: Profile | None, *, prefill_chunk: int = 2048) -> Numerics:
    """The rules qwisp has for the device a profile models; None: the CPU."""
    device = "cpu"
    if isinstance(profile, AppleGPU):
        device = f"metal-applegpu_g{profile.generation}{profile.size}"
    elif profile is not None:
        device = "cuda"
    return rules_for(device, dtype="float32", prefill_chunk=prefill_chunk)


def serve(
    folder: Path | None,
    numerics: Numerics,
    capacity: int,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
) -> list[Outcome]:
    """Serve requests on a fresh engine at one capacity, logits recorded."""
    config = EngineConfig(capacity=capacity, numerics=numerics, record_logits=True)
    with Engine.load(folder, config) as engine:
        requests = [
            Request(prompt, max_tokens=limit)
            for prompt, limit in zip(prompts, max_tokens, strict=True)
        ]
        completions = engine.run(requests)
        engine.check()
    outcomes = []
    for completion in completions:
        assert completion.error is None
        assert len(completion.logits_digests) == len(completion.token_ids) > 0
        outcomes.append(Outcome(completion.token_ids, completion.logits_digests))
    return outcomes


def load(folder: Path | None, numerics: Numerics, capacity: int) -> LoadedModel:
    """A model on the calling thread, for tests that drive rows themselves."""
    return load_model(folder, EngineConfig(capacity=capacity, numerics=numerics), None)


def decode_lanes(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], num_steps: int
) -> list[list[str]]:
    """Greedy decode of several lanes in one batch; per lane the digests of its logits rows."""
    model = loaded.model
    states, tokens, digests = [], [], [[] for _ in prompts]
    for prompt in prompts:
        state = model.new_lane(len(prompt) + num_steps)
        for _ in model.prefill(prompt[:-1], state):
            pass
        states.append(state)
        tokens.append(prompt[-1])
    for _ in range(num_steps):
        step = model.decode(mx.array(tokens, dtype=mx.uint32), states)
        mx.eval(step.logits)
        model.observe(step)
        tokens = mx.argmax(step.logits, axis=-1).tolist()
        for lane, rows in enumerate(digests):
            rows.append(row_digest(step.logits[lane]))
    return digests


def row_digest(row: mx.array) -> str:
    """SHA-256 of a row's bytes."""
    return hashlib.sha256(memoryview(mx.contiguous(row))).hexdigest()
