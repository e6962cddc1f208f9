"""A decode step never copies a lane's keys and values, however far ahead it is launched."""

import mlx.core as mx
import numpy as np
import pytest

from qwisp.lanes.state import KVArena
from tests.l1 import load, rules_of
from tests.synthetic import make_checkpoint

NUM_STEPS = 1000
RESERVED = 4000


@pytest.mark.parametrize("capacity", [8, 16], ids=["streamed", "resident"])
def test_addresses_and_memory_stay_flat_over_a_thousand_steps(capacity: int, tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "model", seed=2)
    loaded = load(folder, rules_of(None), capacity)
    state = loaded.model.new_lane(RESERVED)
    for _ in loaded.model.prefill([3, 1, 4, 1, 5], state):
        pass
    kv = next(layer for layer in state.layers if isinstance(layer, KVArena))
    token, addresses, active = mx.array([9], dtype=mx.uint32), set(), []
    previous = None
    for _ in range(NUM_STEPS):
        step = loaded.model.decode(token, [state])
        token = mx.argmax(step.logits, axis=-1)
        mx.async_eval(token)
        if previous is not None:
            mx.eval(previous.logits)
            loaded.model.observe(previous)
        previous = step
        active.append(mx.get_active_memory())
        if len(active) % 50 == 0:
            mx.eval(token)
            addresses |= {np.asarray(array).__array_interface__["data"][0] for array in kv.arrays}
    loaded.arena.close()
    assert len(addresses) == 2  # keys and values, each at one place
    assert max(active[50:]) - min(active[50:]) < 1 << 20
