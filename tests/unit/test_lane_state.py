"""What a lane owns: reservations hold, writes stay in place, states keep their types."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwisp.errors import InvariantError
from qwisp.lanes.state import GDNState, KVArena, LaneState


def _address(array: mx.array) -> int:
    return np.asarray(array).__array_interface__["data"][0]


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(1, 20))
def test_appended_keys_come_back_in_order_and_never_beyond_the_reservation(
    sizes: list[int], reserved: int
) -> None:
    kv, written = KVArena(reserved, 2, 4, mx.float32), np.zeros((0, 2, 4), np.float32)
    for i, size in enumerate(sizes):
        block = np.full((size, 2, 4), i + 1, np.float32)
        if len(written) + size > reserved:
            with pytest.raises(InvariantError, match=r"^L2"):
                kv.append(mx.array(block), mx.array(-block))
            assert kv.length == len(written)
            return
        keys, values = kv.append(mx.array(block), mx.array(-block))
        written = np.concatenate([written, block])
        np.testing.assert_array_equal(keys, written)
        np.testing.assert_array_equal(values, -written)


def test_decode_steps_never_move_or_grow_the_kv_arena() -> None:
    kv = KVArena(1100, 2, 64, mx.float32)
    mx.eval(kv.arrays)
    addresses = {tuple(map(_address, kv.arrays))}
    token = mx.ones((1, 2, 64))
    active = []
    for _ in range(1000):
        keys, values = kv.append(token, token)
        total = keys.sum() + values.sum()
        del keys, values
        mx.eval(total, kv.arrays)
        addresses.add(tuple(map(_address, kv.arrays)))
        active.append(mx.get_active_memory())
    assert len(addresses) == 1
    assert max(active[10:]) - min(active[10:]) < 1 << 16


def test_gdn_state_keeps_shape_and_f32() -> None:
    state = GDNState(conv_shape=(3, 8), recurrence_shape=(2, 4, 4), dtype=mx.bfloat16)
    assert state.recurrence.dtype == mx.float32
    with pytest.raises(AssertionError):
        state.advance(state.conv, state.recurrence.astype(mx.bfloat16))
    with pytest.raises(AssertionError):
        state.advance(state.conv[1:], state.recurrence)


def test_lane_check_names_the_layer_that_fell_behind() -> None:
    lane = LaneState([KVArena(4, 1, 4, mx.float32), KVArena(4, 1, 4, mx.float32)])
    token = mx.zeros((1, 1, 4))
    for layer in lane.layers:
        layer.append(token, token)
    lane.length = 1
    lane.check()
    lane.layers[1].append(token, token)
    with pytest.raises(InvariantError, match="L2: layer 1 holds 2"):
        lane.check()
