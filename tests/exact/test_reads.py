"""A4 at the level of the engine: what was read is what an independent replay of the routes
demands."""

from pathlib import Path

import pytest

from qwisp import Engine, EngineConfig, Request
from qwisp.arena import read_trace
from qwisp.engine.checkpoint import Checkpoint
from qwisp.engine.loading import EMBEDDED_MODEL
from tests.replay import replay

PROMPTS = ("def fibonacci(n):\n    ", "The whale rose slowly " * 30)


@pytest.mark.parametrize("capacity", [8, 20, 64])
def test_A4_bytes_read_equal_an_independent_replay_of_the_routes(
    capacity: int, tmp_path: Path
) -> None:
    trace_path = tmp_path / "routes.trace"
    config = EngineConfig(capacity=capacity, record_routes=trace_path)
    with Engine.load(None, config) as engine:
        for completion in engine.run([Request(prompt, max_tokens=24) for prompt in PROMPTS]):
            assert completion.error is None
        engine.check()
        stats = engine.stats()
        prefilled = stats.tokens_prefilled
    sizes = {
        layer.layer: layer.expert_nbytes for layer in Checkpoint.open(EMBEDDED_MODEL).expert_layers
    }
    trace = read_trace(trace_path)
    rows = [step.routes.shape[0] for step in trace if step.layer == 0]
    assert sum(rows) == prefilled + stats.tokens_decoded
    if capacity == 64:
        assert (stats.bytes_read, stats.expert_misses) == (0, 0)
        assert stats.bytes_speculative == stats.bytes_transferred == 64 * sum(sizes.values())
        return
    expected = replay(trace, capacity, sizes)
    assert stats.bytes_read == sum(layer.bytes_read for layer in expected.values()) > 0
    for layer in stats.layers:
        assert layer.bytes_read == expected[layer.layer].bytes_read
        assert layer.expert_misses == expected[layer.layer].expert_misses
    assert stats.bytes_transferred == stats.bytes_read
