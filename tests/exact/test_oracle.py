"""Our logits against mlx-lm's on the same checkpoints, teacher-forced, streamed at a small capacity."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from qwisp.engine.loading import EMBEDDED_MODEL
from qwisp.engine.tokenizer import Tokenizer
from tests.l1 import load, rules_of
from tests.oracle import assert_agrees, run_oracle

REAL_TEXT = Path(__file__).parents[2] / "docs" / "design.md"
NUM_TOKENS = 640


def _real_tokens() -> list[int]:
    tokenizer = Tokenizer.load(EMBEDDED_MODEL, (), 8192)
    token_ids = tokenizer.encode(REAL_TEXT.read_text(encoding="utf-8"))[:NUM_TOKENS]
    assert len(token_ids) == NUM_TOKENS
    return list(token_ids)


def _forced_logits(loaded, token_ids: list[int], num_prefilled: int, stop: int) -> np.ndarray:
    """Logits at positions `[num_prefilled, stop)`: a prefill, then decode of the given tokens."""
    state = loaded.model.new_lane(stop)
    for _ in loaded.model.prefill(token_ids[:num_prefilled], state):
        pass
    rows = []
    for token_id in token_ids[num_prefilled:stop]:
        step = loaded.model.decode(mx.array([token_id], dtype=mx.uint32), [state])
        mx.eval(step.logits)
        rows.append(np.array(step.logits[0]))
    return np.stack(rows)


def test_decode_agrees_with_the_oracle_on_real_text(record_property) -> None:
    token_ids = _real_tokens()
    run = run_oracle(EMBEDDED_MODEL, token_ids)
    loaded = load(None, rules_of(None), 64)
    logits = _forced_logits(loaded, token_ids, 0, NUM_TOKENS)
    worst = assert_agrees(run, logits, np.arange(NUM_TOKENS))
    print(f"oracle: {run.compared_len} positions compared, {run.num_ties} router ties, {worst:.2e}")
    record_property("router_ties", run.num_ties)


@pytest.mark.parametrize("num_prefilled", [1, 20, 31, 32, 127, 128, 129, 600])
def test_prefill_of_any_length_agrees_with_the_oracle(num_prefilled: int) -> None:
    token_ids = _real_tokens()[: num_prefilled + 4]
    run = run_oracle(EMBEDDED_MODEL, token_ids)
    loaded = load(None, rules_of(None, prefill_chunk=256), 12)
    logits = _forced_logits(loaded, token_ids, num_prefilled, len(token_ids))
    assert_agrees(run, logits, np.arange(num_prefilled, len(token_ids)))
    loaded.arena.check()
    loaded.arena.close()
