import mlx.core as mx
import numpy as np

from qwisp.arena.arena import ExpertArena
from qwisp.arena.bank import SlotBank
from qwisp.arena.reader import PreadReader
from qwisp.arena.source import ExpertLayer, ExpertPart
from tests.expert_files import PARTS


def address(array):
    return np.asarray(array.view(mx.uint8)).ctypes.data


def test_bytes_written_into_a_slot_are_seen_by_mlx(files):
    bank = SlotBank(files.layers[0], capacity=3)
    expected = files.part_bytes(1, 7)
    for buffer, data in zip(bank.buffers(2), expected, strict=True):
        buffer[:] = data
    for (name, _, _), data in zip(PARTS, expected, strict=True):
        # An operation of MLX's, so that it is not the view that is compared with itself.
        moved = mx.concatenate([bank.arrays[name][2:], bank.arrays[name][:1]])
        assert np.array(moved.view(mx.uint8)).tobytes() == data + bytes(len(data))


def test_arrays_have_the_parts_shapes_and_types(files):
    bank = SlotBank(files.layers[0], capacity=3)
    assert list(bank.arrays) == [name for name, _, _ in PARTS]
    for name, dtype, shape in PARTS:
        assert bank.arrays[name].shape == (3, *shape)
        assert bank.arrays[name].dtype == getattr(mx, dtype)
    assert bank.nbytes == 3 * files.expert_nbytes


def test_bfloat16_values_keep_their_meaning(tmp_path):
    part = ExpertPart("scales", tmp_path / "none", 0, 4, (2,), "bfloat16")
    bank = SlotBank(ExpertLayer(0, 8, (part,)), capacity=2)
    bank.buffers(1)[0][:] = bytes.fromhex("803f20c0")
    assert (bank.arrays["scales"] * 2).tolist() == [[0.0, 0.0], [2.0, -5.0]]


def test_buffers_of_slots_do_not_overlap(files):
    bank = SlotBank(files.layers[0], capacity=3)
    for slot in range(3):
        for buffer in bank.buffers(slot):
            buffer[:] = bytes([slot + 1]) * buffer.nbytes
    for array in bank.arrays.values():
        for slot in range(3):
            assert set(np.array(array.view(mx.uint8))[slot].tobytes()) == {slot + 1}


def test_no_array_moves_while_slots_are_read_a_thousand_times(files):
    arena = ExpertArena(files.layers, 3, PreadReader(2))
    before = {name: (array, address(array)) for name, array in arena.bank(1).items()}
    memory = None
    rng = np.random.default_rng(0)
    for number in range(1000):
        for found in (step := arena.begin(1, rng.integers(0, 12, (2, 2)), kind="decode")):
            slots = mx.array(found.slots)
            step.fence(sum(array[slots].sum() for array in arena.bank(1).values()))
        if number == 100:
            memory = mx.get_active_memory()
    assert arena.stats().expert_misses > 1000
    assert arena.bank(1) is arena.bank(1)
    for name, (array, at) in before.items():
        assert arena.bank(1)[name] is array
        assert address(array) == at
    assert mx.get_active_memory() <= memory
    arena.close()
