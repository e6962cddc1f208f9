"""Our logits against mlx-lm's on the same checkpoints, teacher-forced, streamed at a small
capacity."""

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from qwisp.engine.loading import EMBEDDED_MODEL
from qwisp.engine.tokenizer import Tokenizer
from tests.l1 import load, rules_of
from tests.oracle import assert_agrees, recorded_routes, run_oracle
from tests.synthetic import make_checkpoint

REAL_TEXT = Path(__file__).parents[2] / "LICENSE"
"""A text that stays as it is; from its first section on, no near-tie parts the engines' routes."""
NUM_TOKENS = 640
VOCAB = 512


def _real_tokens() -> list[int]:
    tokenizer = Tokenizer.load(EMBEDDED_MODEL, (), 8192)
    text = REAL_TEXT.read_text(encoding="utf-8")
    token_ids = tokenizer.encode(text[text.index("   1. Definitions.") :])[:NUM_TOKENS]
    assert len(token_ids) == NUM_TOKENS
    return list(token_ids)


def _check_agreement(
    folder: Path, token_ids: list[int], *, capacity: int, num_prefilled: int
) -> None:
    """A prefill, then decode of the given tokens, held against the oracle."""
    run = run_oracle(folder, token_ids)
    loaded = load(folder, rules_of(None, prefill_chunk=256), capacity)
    state = loaded.model.new_lane(len(token_ids))
    rows = []
    with recorded_routes() as routes:
        for _ in loaded.model.prefill(token_ids[:num_prefilled], state):
            pass
        for token_id in token_ids[num_prefilled:]:
            step = loaded.model.decode(mx.array([token_id], dtype=mx.uint32), [state])
            rows.append(np.array(step.logits[0]))
    loaded.arena.check()
    loaded.arena.close()
    positions = np.arange(num_prefilled, len(token_ids))
    agreement = assert_agrees(run, np.stack(rows), positions, routes)
    assert agreement.positions_compared == len(positions), "a near-tie parted the routes"
    print(f"mlx-lm {version('mlx-lm')}: {agreement}")


def test_decode_agrees_with_the_oracle_on_real_text() -> None:
    _check_agreement(EMBEDDED_MODEL, _real_tokens(), capacity=64, num_prefilled=0)


@pytest.mark.parametrize("num_prefilled", [1, 31, 32, 127, 128, 129, 600])
def test_prefill_of_any_length_agrees_with_the_oracle(num_prefilled: int) -> None:
    token_ids = _real_tokens()[: num_prefilled + 4]
    _check_agreement(EMBEDDED_MODEL, token_ids, capacity=12, num_prefilled=num_prefilled)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "qwen3_moe"])
def test_every_family_decodes_as_the_oracle_does(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", family, seed=9, mixed_bits=True)
    token_ids = np.random.default_rng(4).integers(0, VOCAB, 520).tolist()
    _check_agreement(folder, token_ids, capacity=8, num_prefilled=0)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "qwen3_moe"])
def test_every_layout_of_a_checkpoint_agrees_with_the_oracle(
    family: str, tied: bool, shards: int, tmp_path: Path
) -> None:
    folder = make_checkpoint(
        tmp_path / "model", family, seed=3, shards=shards, tied=tied, mixed_bits=True
    )
    token_ids = np.random.default_rng(4).integers(0, VOCAB, 560).tolist()
    _check_agreement(folder, token_ids, capacity=8, num_prefilled=500)
