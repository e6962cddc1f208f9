"""The oracle: mlx-lm's logits for a token sequence, and how close its routers came to a tie.

mlx-lm is an independent implementation of the same models. Where a router's margin between the last
chosen expert and the next is below rounding (a tie), two right implementations may choose
differently, and from there on their states differ. So the routes are compared too: they may differ
at ties only, and the logits must agree at every position before the first route that does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock
from mlx_lm.utils import load_model

import qwisp.engine.moe as moe

TIE_MARGIN = 1e-5
ARGMAX_MARGIN = 1e-3
LOGITS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class OracleRun:
    """A teacher-forced run.

    logits: `[tokens, vocab]`. routes: `[moe layers, tokens, top_k]`, ids ascending. margins:
    `[moe layers, tokens]`, of the last chosen expert's probability over the next one's.
    """

    logits: np.ndarray
    routes: np.ndarray
    margins: np.ndarray

    @property
    def tie_positions(self) -> np.ndarray:
        """Positions where some router came within TIE_MARGIN of choosing differently."""
        return np.flatnonzero((self.margins < TIE_MARGIN).any(axis=0))


@dataclass(frozen=True)
class Agreement:
    """How far two runs went together."""

    positions_compared: int
    largest_difference: float
    num_ties: int


def run_oracle(folder: Path, token_ids: list[int]) -> OracleRun:
    """All logits of a sequence in one call of mlx-lm's model."""
    model, _ = load_model(folder)
    with _recorded_gates() as calls:
        logits = model(mx.array(token_ids)[None])[0].astype(mx.float32)
        mx.eval(logits)
    gates, top_k = np.stack([np.array(each[0]) for each, _ in calls]), calls[0][1]
    order = np.argsort(-gates, axis=-1, kind="stable")
    chosen = np.take_along_axis(gates, order[..., top_k - 1 : top_k + 1], axis=-1)
    routes = np.sort(order[..., :top_k], axis=-1)
    return OracleRun(np.array(logits), routes, chosen[..., 0] - chosen[..., 1])


@contextmanager
def _recorded_gates() -> Iterator[list[tuple[mx.array, int]]]:
    """Collect each MoE block's router probabilities, `[1, tokens, experts]`, and its top_k."""
    calls: list[tuple[mx.array, int]] = []
    originals = {cls: cls.__call__ for cls in (Qwen3MoeSparseMoeBlock, Qwen3NextSparseMoeBlock)}

    def recording(original):
        def call(self, x):
            calls.append((mx.softmax(self.gate(x), axis=-1, precise=True), self.top_k))
            return original(self, x)

        return call

    for cls, original in originals.items():
        cls.__call__ = recording(original)
    try:
        yield calls
    finally:
        for cls, original in originals.items():
            cls.__call__ = original


@contextmanager
def recorded_routes() -> Iterator[dict[int, list[np.ndarray]]]:
    """Collect the ids that qwisp's own routers choose: per layer, `[rows, top_k]` of each call."""
    routes: dict[int, list[np.ndarray]] = {}
    call, route = moe.MoEBlock.__call__, moe.route
    layers: list[int] = []

    def entering(self, x, math):
        layers.append(self.layer)
        return call(self, x, math)

    def recording(*args, **kwargs):
        ids, scores = route(*args, **kwargs)
        routes.setdefault(layers[-1], []).append(np.array(ids))
        return ids, scores

    with (
        mock.patch.object(moe.MoEBlock, "__call__", entering),
        mock.patch.object(moe, "route", recording),
    ):
        yield routes


def assert_agrees(
    run: OracleRun,
    logits: np.ndarray,
    positions: np.ndarray,
    routes: dict[int, list[np.ndarray]],
) -> Agreement:
    """Hold our logits, `[len(positions), vocab]`, against the oracle's at those positions.

    routes: ours from position 0 on, by layer; the last layer may lack those of a prefill, which
    needs no output of it.
    """
    limit = _first_route_difference(run, routes)
    expected = run.logits[positions]
    before = positions < limit
    assert before.any(), f"routes differ from position {limit} on, before any compared"
    top_two = np.sort(expected, axis=-1)[:, -2:]
    is_clear = top_two[:, 1] - top_two[:, 0] > ARGMAX_MARGIN
    assert is_clear.any()
    np.testing.assert_array_equal(
        logits[is_clear].argmax(-1), expected[is_clear].argmax(-1), err_msg="argmax"
    )
    worst = float(np.abs(logits - expected)[before].max())
    assert worst <= LOGITS_TOLERANCE, f"largest logit difference {worst}"
    return Agreement(int(before.sum()), worst, len(run.tie_positions))


def _first_route_difference(run: OracleRun, routes: dict[int, list[np.ndarray]]) -> int:
    """First position where a route differs, which must be a tie; the number of tokens if none
    does."""
    num_tokens = run.routes.shape[1]
    first = num_tokens
    for index, layer in enumerate(sorted(routes)):
        ours = np.sort(np.concatenate(routes[layer]), axis=-1)
        start = num_tokens - len(ours)
        differs = np.flatnonzero((ours != run.routes[index, start:]).any(axis=-1)) + start
        if len(differs):
            first = min(first, int(differs[0]))
    if first < num_tokens:
        assert first in run.tie_positions, f"a route differs at position {first}, which is no tie"
    return first
