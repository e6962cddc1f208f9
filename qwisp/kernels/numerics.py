"""`Numerics`: the frozen record of everything that may change a bit, and how each device fills it.

Two runs with equal digests give equal bytes of logits for the same checkpoint and prompt (L1).
Nothing here is ever derived from the capacity, the number of lanes or the memory of the machine.
"""

import hashlib
import json
import platform
import re
from dataclasses import asdict, dataclass
from importlib.metadata import version

import mlx.core as mx

from qwisp.errors import ConfigError, DeviceError

RECIPE = 2
"""Version of the arithmetic in `qwisp.kernels` and of the order in which the model calls it."""

EXPERT_MAJOR_TOKENS = 32
"""Default of `Numerics.expert_major_tokens`: at top-8 of 64 to 256 experts, shorter chunks give an
expert hardly more than one row, and one gather call then beats a call per expert."""


@dataclass(frozen=True)
class Numerics:
    """Which form every operation takes.

    MLX chooses a kernel by the shape of a call, and on a GPU another kernel means other bits. So
    each rule below keeps the calls that may see several rows inside one kernel class, whatever else
    is in the call; docs/exactness.md says where each class ends and how that is known.
    """

    device: str
    """`cpu-<architecture>`, `metal-<architecture>` or `cuda-<architecture>`."""
    mlx_version: str
    dtype: str
    """Type of activations, scales and logits."""
    prefill_chunk: int
    """Prefill runs in chunks that end at multiples of this position."""
    attention_tile: int
    """Prefill attention runs in query tiles that end at multiples of this position."""
    linear_rows: tuple[int, int]
    """Least and most rows of one quantised matmul in decode. More rows are tiled, fewer are
    padded."""
    dense_rows_max: int
    """Most rows of one dense matmul in decode. On a GPU it is 1: dense kernels change at every
    count."""
    gather_pairs_min: int
    """Least (row, expert) pairs of one gathered matmul; fewer are padded with a copy of the
    first."""
    expert_major_tokens: int
    """Prefill chunks of at least this many tokens compute expert by expert, shorter ones pair by
    pair."""
    recipe: int = RECIPE

    def __post_init__(self) -> None:
        low, high = self.linear_rows
        for name, value, least in (
            ("prefill_chunk", self.prefill_chunk, 1),
            ("attention_tile", self.attention_tile, 1),
            ("linear_rows[0]", low, 1),
            ("linear_rows[1]", high, max(low, 2 * low - 1)),
            ("dense_rows_max", self.dense_rows_max, 1),
            ("gather_pairs_min", self.gather_pairs_min, 1),
            ("expert_major_tokens", self.expert_major_tokens, 1),
        ):
            if value < least:
                raise ConfigError(f"Numerics: {name}={value} is below {least}, its least value")

    @property
    def digest(self) -> str:
        """SHA-256 hex digest of the record. Equal digests promise equal bytes."""
        canonical = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def row_tiles(self, num_rows: int) -> list[tuple[int, int]]:
        """Half-open row ranges of the calls that `num_rows` decode rows are computed in.

        Each range has at most `linear_rows[1]` rows, and at least `linear_rows[0]` unless there are
        fewer rows in all; such a lone range is padded by the caller.
        """
        low, high = self.linear_rows
        tiles = []
        start = 0
        while start < num_rows:
            stop = min(start + high, num_rows)
            if 0 < num_rows - stop < low:
                stop = num_rows - low
            tiles.append((start, stop))
            start = stop
        return tiles


def device_numerics(*, dtype: str, prefill_chunk: int) -> Numerics:
    """The rules of the device MLX computes on by default in this process.

    Raises:
        DeviceError: the GPU's architecture is not one whose kernel classes are known.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        device = f"cpu-{platform.machine()}"
    elif mx.metal.is_available():
        device = f"metal-{mx.device_info()['architecture']}"
    else:
        device = f"cuda-{mx.device_info().get('architecture', 'unknown')}"
    return rules_for(device, dtype=dtype, prefill_chunk=prefill_chunk)


def rules_for(device: str, *, dtype: str, prefill_chunk: int) -> Numerics:
    """The rules of a device by name, also of one that is not in this machine.

    Args:
        device: `cpu` or `cuda`, either with `-<architecture>` if it matters, or
            `metal-applegpu_g<generation><size>`, such as `metal-applegpu_g13g`.
        dtype: name of the activation type.
        prefill_chunk: tokens of one prefill call.

    Raises:
        DeviceError: the device's kernel classes are not known.
    """
    linear_rows, dense_rows_max, gather_pairs_min = _kernel_classes(device)
    return Numerics(
        device=device,
        mlx_version=version("mlx"),
        dtype=dtype,
        prefill_chunk=prefill_chunk,
        attention_tile=128,
        linear_rows=linear_rows,
        dense_rows_max=dense_rows_max,
        gather_pairs_min=gather_pairs_min,
        expert_major_tokens=EXPERT_MAJOR_TOKENS,
    )


def _kernel_classes(device: str) -> tuple[tuple[int, int], int, int]:
    """`linear_rows`, `dense_rows_max` and `gather_pairs_min` of a device, from MLX's dispatch.

    Metal: `get_qmv_batch_limit` is 6 at its smallest, so 5 rows never leave the vector kernels;
    from generation 15 (M3) on, one row alone takes another kernel than two or more. CUDA: both
    operations change kernel at 8. MLX 0.32.4, mlx/backend/{metal,cuda}/quantized*.
    """
    kind = device.partition("-")[0]
    if kind == "cpu":
        return (1, 1 << 20), 1 << 20, 1
    if kind == "cuda":
        return (1, 7), 1, 8
    metal = re.fullmatch(r"metal-applegpu_g(\d+)[a-z]", device)
    if metal is None:
        raise DeviceError(
            f"device {device!r}: its kernel classes are not known; "
            "known are cpu, cuda and metal-applegpu_g<generation><size>"
        )
    return ((1, 5) if int(metal[1]) < 15 else (2, 5)), 1, 1
