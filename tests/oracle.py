"""The oracle: mlx-lm's logits for a token sequence, and how close its routers came to a tie.

mlx-lm is an independent implementation of the same models. Where a router's margin between the last
chosen expert and the next is below rounding, two right implementations may choose differently, and
from there on their states differ; so logits are compared up to the first such position.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock
from mlx_lm.utils import load_model

TIE_MARGIN = 1e-5
ARGMAX_MARGIN = 1e-3
LOGITS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class OracleRun:
    """Teacher-forced logits `[tokens, vocab]` and, per token, the least router margin of any layer."""

    logits: np.ndarray
    router_margins: np.ndarray

    @property
    def num_ties(self) -> int:
        """Positions where some router came within TIE_MARGIN of choosing differently."""
        return int((self.router_margins < TIE_MARGIN).sum())

    @property
    def compared_len(self) -> int:
        """Positions before the first tie."""
        ties = np.flatnonzero(self.router_margins < TIE_MARGIN)
        return int(ties[0]) if len(ties) else len(self.router_margins)


def run_oracle(folder: Path, token_ids: list[int]) -> OracleRun:
    """All logits of a sequence in one call of mlx-lm's model."""
    model, _ = load_model(folder)
    with _recorded_margins() as margins:
        logits = model(mx.array(token_ids)[None])[0].astype(mx.float32)
        mx.eval(logits)
    least = np.min([np.array(layer).reshape(-1) for layer in margins], axis=0)
    return OracleRun(np.array(logits), least)


@contextmanager
def _recorded_margins() -> Iterator[list[mx.array]]:
    """Collect each MoE block's margin between its k-th and (k+1)-th probability, `[tokens]`."""
    margins: list[mx.array] = []
    originals = {cls: cls.__call__ for cls in (Qwen3MoeSparseMoeBlock, Qwen3NextSparseMoeBlock)}

    def recording(original):
        def call(self, x):
            gates = mx.sort(mx.softmax(self.gate(x), axis=-1, precise=True), axis=-1)
            margins.append(gates[..., -self.top_k] - gates[..., -self.top_k - 1])
            return original(self, x)

        return call

    for cls, original in originals.items():
        cls.__call__ = recording(original)
    try:
        yield margins
    finally:
        for cls, original in originals.items():
            cls.__call__ = original


def assert_agrees(run: OracleRun, logits: np.ndarray, positions: np.ndarray) -> float:
    """Hold our logits, `[len(positions), vocab]`, against the oracle's at those positions.

    Returns the largest difference over the positions before the first tie.
    """
    expected = run.logits[positions]
    before_tie = positions < run.compared_len
    assert before_tie.any(), "the first tie comes before every position compared"
    top_two = np.sort(expected, axis=-1)[:, -2:]
    is_clear = before_tie & (top_two[:, 1] - top_two[:, 0] > ARGMAX_MARGIN)
    assert is_clear.any()
    np.testing.assert_array_equal(
        logits[is_clear].argmax(-1), expected[is_clear].argmax(-1), err_msg="argmax"
    )
    worst = float(np.abs(logits - expected)[before_tie].max())
    assert worst <= LOGITS_TOLERANCE, f"largest logit difference {worst}"
    return worst
