import pytest

from qwisp.arena.arena import ExpertArena
from qwisp.arena.reader import PreadReader
from tests.arena_steps import NUM_EXPERTS
from tests.expert_files import ExpertFiles


@pytest.fixture
def files(tmp_path):
    """Two layers of experts on disk."""
    return ExpertFiles(tmp_path, num_layers=2, num_experts=NUM_EXPERTS)


@pytest.fixture
def open_arena(files):
    """Makes arenas over `files` that are closed after the test."""
    arenas = []

    def make(capacity, reader=None, **options):
        arenas.append(ExpertArena(files.layers, capacity, reader or PreadReader(2), **options))
        return arenas[-1]

    yield make
    for arena in arenas:
        arena.close()
