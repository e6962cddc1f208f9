import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwisp import Engine, EngineConfig
from qwisp.arena.arena import ExpertArena
from qwisp.arena.reader import PreadReader
from tests.arena_steps import NUM_EXPERTS
from tests.expert_files import ExpertFiles
from tests.synthetic import make_checkpoint


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=21, vocab=512)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder, EngineConfig(capacity=8, record_logits=True)) as engine:
        yield engine


@pytest.fixture(scope="module")
def endless(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose model has no end of text."""
    copy = tmp_path_factory.mktemp("endless")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with Engine.load(copy, EngineConfig(capacity=8)) as engine:
        yield engine


@pytest.fixture(scope="module")
def embedded() -> Iterator[Engine]:
    with Engine.load() as engine:
        yield engine
