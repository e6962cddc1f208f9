"""Loads the resident weights: file bytes go straight into MLX's memory, one tensor at a time."""

import os
from collections.abc import Callable, Sequence

import mlx.core as mx

from qwisp.engine.checkpoint import MLX_DTYPES, Checkpoint
from qwisp.engine.safetensors_header import TensorInfo
from qwisp.engine.spec import GDNSpec
from qwisp.engine.weights import (
    AttentionWeights,
    GDNWeights,
    LayerWeights,
    ModelWeights,
    MoEWeights,
    SwiGLUWeights,
)
from qwisp.errors import CheckpointError
from qwisp.kernels.weights import DenseWeight, QuantizedWeight, Weight

_MAX_READ_NBYTES = 1 << 30
"""Of one call; macOS refuses 2 GiB."""

Rows = Sequence[range]
"""Runs of rows of a stored matrix, in the order they take in memory."""


def load_resident(
    checkpoint: Checkpoint, on_progress: Callable[[int, int], None] | None = None
) -> ModelWeights:
    """Reads every weight but the routed experts, of which it reads nothing.

    The arrays are evaluated, so that any thread may use them. Memory peaks at about one tensor
    above `checkpoint.resident_nbytes`.

    Args:
        checkpoint: what to load.
        on_progress: called with (bytes read, bytes in all) after each tensor.

    Raises:
        CheckpointError: a file cannot be read or became shorter.
    """
    return _Loader(checkpoint, on_progress or (lambda done, total: None)).model()


class _Loader:
    def __init__(self, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
        self._spec = checkpoint.spec
        self._matrices = checkpoint.matrices
        self._vectors = checkpoint.vectors
        self._dtype: mx.Dtype = getattr(mx, checkpoint.dtype)
        self._on_progress = on_progress
        self._done_nbytes = 0
        self._total_nbytes = sum(t.nbytes for m in self._matrices.values() for t in m.tensors)
        self._total_nbytes += sum(t.nbytes for t in self._vectors.values())

    def model(self) -> ModelWeights:
        embed_tokens = self._matrix("embed_tokens")
        return ModelWeights(
            embed_tokens=embed_tokens,
            layers=tuple(self._layer(idx) for idx in range(len(self._spec.layers))),
            norm=self._vector("norm.weight"),
            lm_head=embed_tokens if self._spec.tie_word_embeddings else self._matrix("lm_head"),
        )

    def _layer(self, idx: int) -> LayerWeights:
        path, layer = f"layers.{idx}", self._spec.layers[idx]
        return LayerWeights(
            input_norm=self._vector(f"{path}.input_layernorm.weight"),
            post_attention_norm=self._vector(f"{path}.post_attention_layernorm.weight"),
            mixer=self._gdn(f"{path}.linear_attn")
            if layer.mixer == "gdn"
            else self._attention(f"{path}.self_attn"),
            feed_forward=self._moe(f"{path}.mlp")
            if layer.feed_forward == "moe"
            else self._swiglu(f"{path}.mlp"),
        )

    def _attention(self, path: str) -> AttentionWeights:
        return AttentionWeights(
            q_proj=self._matrix(f"{path}.q_proj"),
            k_proj=self._matrix(f"{path}.k_proj"),
            v_proj=self._matrix(f"{path}.v_proj"),
            o_proj=self._matrix(f"{path}.o_proj"),
            q_norm=self._vector(f"{path}.q_norm.weight"),
            k_norm=self._vector(f"{path}.k_norm.weight"),
        )

    def _gdn(self, path: str) -> GDNWeights:
        qkv, z, b, a = self._gdn_inputs(path)
        conv = self._vector(f"{path}.conv1d.weight")
        return GDNWeights(
            in_proj_qkv=qkv,
            in_proj_z=z,
            in_proj_b=b,
            in_proj_a=a,
            out_proj=self._matrix(f"{path}.out_proj"),
            conv=_evaluated(mx.contiguous(conv.squeeze(-1).T)),
            a_log=self._vector(f"{path}.A_log", mx.float32),
            dt_bias=self._vector(f"{path}.dt_bias"),
            norm=self._vector(f"{path}.norm.weight"),
        )

    def _gdn_inputs(self, path: str) -> Sequence[Weight]:
        if f"{path}.in_proj_qkvz" not in self._matrices:
            return [self._matrix(f"{path}.in_proj_{part}") for part in ("qkv", "z", "b", "a")]
        assert self._spec.gdn is not None
        rows = fused_rows(self._spec.gdn)
        return [
            self._matrix(f"{path}.{fused}", rows[part])
            for fused, part in (
                ("in_proj_qkvz", "qkv"),
                ("in_proj_qkvz", "z"),
                ("in_proj_ba", "b"),
                ("in_proj_ba", "a"),
            )
        ]

    def _moe(self, path: str) -> MoEWeights:
        has_shared = self._spec.moe.shared_intermediate_size > 0
        return MoEWeights(
            router=self._matrix(f"{path}.gate"),
            shared_expert=self._swiglu(f"{path}.shared_expert") if has_shared else None,
            shared_expert_gate=self._matrix(f"{path}.shared_expert_gate") if has_shared else None,
        )

    def _swiglu(self, path: str) -> SwiGLUWeights:
        return SwiGLUWeights(
            gate_proj=self._matrix(f"{path}.gate_proj"),
            up_proj=self._matrix(f"{path}.up_proj"),
            down_proj=self._matrix(f"{path}.down_proj"),
        )

    def _matrix(self, path: str, rows: Rows | None = None) -> Weight:
        stored = self._matrices[path]
        if stored.scales is None or stored.biases is None or stored.quantization is None:
            return DenseWeight(_evaluated(self._read(stored.weight, rows).astype(self._dtype)))
        return QuantizedWeight(
            weight=self._read(stored.weight, rows),
            scales=self._read(stored.scales, rows),
            biases=self._read(stored.biases, rows),
            quantization=stored.quantization,
        )

    def _vector(self, name: str, dtype: mx.Dtype | None = None) -> mx.array:
        return _evaluated(self._read(self._vectors[name]).astype(dtype or self._dtype))

    def _read(self, tensor: TensorInfo, rows: Rows | None = None) -> mx.array:
        array = read_tensor(tensor, rows)
        self._done_nbytes += array.nbytes
        self._on_progress(self._done_nbytes, self._total_nbytes)
        return array


def fused_rows(gdn: GDNSpec) -> dict[str, Rows]:
    """Where qwen3_next keeps the rows of GDN's input projections.

    Both fused matrices have one block of rows per key head:

        in_proj_qkvz  [q | k | v of the key head's value heads | z of them]
        in_proj_ba    [b of the key head's value heads | a of them]

    The result is in the order of `GDNWeights`: head by head within each part.
    """
    values_per_key = gdn.num_value_heads // gdn.num_key_heads
    q = k = gdn.key_head_dim
    v = z = values_per_key * gdn.value_head_dim

    def runs(block: int, start: int, size: int) -> list[range]:
        starts = (head * block + start for head in range(gdn.num_key_heads))
        return [range(first, first + size) for first in starts]

    qkvz = q + k + v + z
    return {
        "qkv": [*runs(qkvz, 0, q), *runs(qkvz, q, k), *runs(qkvz, q + k, v)],
        "z": runs(qkvz, q + k + v, z),
        "b": runs(2 * values_per_key, 0, values_per_key),
        "a": runs(2 * values_per_key, values_per_key, values_per_key),
    }


def read_tensor(tensor: TensorInfo, rows: Rows | None = None) -> mx.array:
    """A tensor as stored, or some of its rows, read into memory that MLX owns.

    Raises:
        CheckpointError: the file cannot be read or became shorter.
    """
    rows = [range(tensor.shape[0])] if rows is None else rows
    num_rows = sum(map(len, rows))
    row_nbytes = tensor.nbytes // tensor.shape[0]
    raw = mx.zeros((num_rows * row_nbytes,), mx.uint8)
    mx.eval(raw)
    memory = memoryview(raw)  # type: ignore[arg-type]
    try:
        fd = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for run in rows:
                part, memory = memory[: len(run) * row_nbytes], memory[len(run) * row_nbytes :]
                _read_exactly(fd, part, tensor.offset + run.start * row_nbytes, tensor)
        finally:
            os.close(fd)
    except OSError as failure:
        raise CheckpointError(f"{tensor} cannot be read: {failure.strerror}") from failure
    typed = raw.view(getattr(mx, MLX_DTYPES[tensor.dtype]))
    return _evaluated(typed.reshape(num_rows, *tensor.shape[1:]))


def _read_exactly(fd: int, memory: memoryview, offset: int, tensor: TensorInfo) -> None:
    while memory.nbytes > 0:
        nbytes = os.preadv(fd, [memory[:_MAX_READ_NBYTES]], offset)
        if nbytes == 0:
            raise CheckpointError(f"{tensor}: the file became shorter: it ends at byte {offset}")
        memory, offset = memory[nbytes:], offset + nbytes


def _evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array
