"""A4: what an arena counted equals what a plain LRU replay of its own trace says."""

import numpy as np
import pytest

from qwisp.arena.arena import ExpertArena
from qwisp.arena.reader import PreadReader
from qwisp.arena.trace import TraceWriter, read_trace
from tests.expert_files import ExpertFiles
from tests.replay import replay

NUM_EXPERTS = 24
TOP_K = 4
COUNTS = (
    "expert_hits",
    "expert_misses",
    "bytes_read",
    "layer_steps",
    "split_layer_steps",
    "passes",
)


def random_routes(rng, num_rows):
    # Squaring makes low ids common, so that there are hits to find.
    order = np.argsort(rng.random((num_rows, NUM_EXPERTS)) * np.arange(1, NUM_EXPERTS + 1) ** 2)
    return order[:, :TOP_K]


@pytest.mark.parametrize("capacity", [4, 5, 8, 13, 23, 24])
def test_reads_equal_an_independent_replay_of_the_trace(tmp_path, capacity):
    files = ExpertFiles(tmp_path, num_layers=3, num_experts=NUM_EXPERTS)
    path = tmp_path / "routes.trace"
    trace = TraceWriter.create(
        path, fingerprint="", num_experts=NUM_EXPERTS, top_k=TOP_K, layers=files.layer_ids
    )
    arena = ExpertArena(files.layers, capacity, PreadReader(2), trace=trace)
    bank, rng = arena.bank(1)["gate_proj.scales"], np.random.default_rng(capacity)
    for number in range(60):
        kind, num_rows = ("prefill", 9) if number % 10 == 0 else ("decode", 1 + number % 3)
        for layer in files.layer_ids:
            step = arena.begin(layer, random_routes(rng, num_rows), kind=kind)
            for _ in step:
                step.fence(bank)
    arena.close()

    stats = arena.stats()
    expected = replay(
        read_trace(path), capacity, dict.fromkeys(files.layer_ids, files.expert_nbytes)
    )
    for counted in stats.layers:
        assert {name: getattr(counted, name) for name in COUNTS} == vars(expected[counted.layer])
    assert stats.reads == len(files.layers[0].parts) * stats.expert_misses
    assert stats.bytes_transferred == stats.bytes_read
    if capacity < NUM_EXPERTS - 1:
        assert stats.expert_misses > 3 * NUM_EXPERTS
    if capacity < 2 * TOP_K:
        assert stats.split_layer_steps > 0
