"""Small files of random experts, as an arena reads them, and the bytes it should find."""

import math
import random
from pathlib import Path

from qwisp.arena.source import ExpertLayer, ExpertPart

# Four parts of different sizes and types; bfloat16 has no numpy dtype.
PARTS = (
    ("gate_proj.weight", "uint32", (3, 5)),
    ("gate_proj.scales", "float32", (3, 1)),
    ("down_proj.weight", "uint32", (2, 3)),
    ("down_proj.scales", "bfloat16", (7,)),
)
ITEMSIZE = {"uint32": 4, "float32": 4, "bfloat16": 2}


class ExpertFiles:
    """Layers 1, 3, 5... whose parts lie at odd offsets of two files each."""

    def __init__(self, folder: Path, *, num_layers: int, num_experts: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self._contents: dict[Path, bytes] = {}
        self.layers = [
            self._write_layer(folder, 2 * n + 1, num_experts, rng) for n in range(num_layers)
        ]
        self._by_id = {source.layer: source for source in self.layers}

    @property
    def layer_ids(self) -> list[int]:
        return list(self._by_id)

    @property
    def expert_nbytes(self) -> int:
        return self.layers[0].expert_nbytes

    def part_bytes(self, layer: int, expert: int) -> list[bytes]:
        """An expert's bytes as written, part by part."""
        found = []
        for part in self._by_id[layer].parts:
            start = part.offset + expert * part.nbytes
            found.append(self._contents[part.path][start : start + part.nbytes])
        return found

    def find(self, path: Path, offset: int) -> tuple[int, int]:
        """The layer and expert that own a byte."""
        for source in self.layers:
            for part in source.parts:
                end = part.offset + source.num_experts * part.nbytes
                if part.path == path and part.offset <= offset < end:
                    return source.layer, (offset - part.offset) // part.nbytes
        raise LookupError(f"{path} at {offset}")

    def _write_layer(
        self, folder: Path, layer: int, num_experts: int, rng: random.Random
    ) -> ExpertLayer:
        data = {folder / f"{layer}-{n}.bin": bytearray(rng.randbytes(13)) for n in range(2)}
        parts = []
        for index, (name, dtype, shape) in enumerate(PARTS):
            path = list(data)[index % 2]
            nbytes = math.prod(shape) * ITEMSIZE[dtype]
            parts.append(ExpertPart(name, path, len(data[path]), nbytes, shape, dtype))
            data[path] += rng.randbytes(num_experts * nbytes)
        for path, content in data.items():
            path.write_bytes(content)
            self._contents[path] = bytes(content)
        return ExpertLayer(layer, num_experts, tuple(parts))
