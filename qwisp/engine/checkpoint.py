"""A model folder, checked as a whole: every tensor that will be used, before any data is read."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from qwisp.arena.source import ExpertLayer, ExpertPart
from qwisp.engine.json_object import read_bounded
from qwisp.engine.layout import (
    PROJECTIONS,
    Vector,
    expert_matrices,
    resident_matrices,
    resident_vectors,
)
from qwisp.engine.model_config import MAX_CONFIG_NBYTES, ModelConfig, parse_model_config
from qwisp.engine.safetensors_header import TensorInfo
from qwisp.engine.shards import read_shards
from qwisp.engine.spec import ModelSpec
from qwisp.engine.stored_tensors import (
    StoredMatrix,
    Tensors,
    check_names,
    common_scale_dtype,
    stored_experts,
    stored_matrix,
    stored_vector,
)
from qwisp.kernels.weights import Quantization

MLX_DTYPES = {"U32": "uint32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""MLX's names of the types that a supported tensor may have."""

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose configuration and headers fit together. Holds no file open."""

    folder: Path
    spec: ModelSpec
    dtype: str
    """MLX's name of the type of the scales, which the activations use."""
    matrices: Mapping[str, StoredMatrix]
    """Resident matrices, by canonical module name."""
    vectors: Mapping[str, TensorInfo]
    """Other resident tensors, by canonical name."""
    resident_nbytes: int
    """Bytes of the resident weights once they are loaded."""
    experts: Mapping[int, Mapping[str, StoredMatrix]]
    """Routed experts, by layer and projection."""
    fingerprint: str
    """SHA-256 hex digest over config.json and all headers, not the data."""

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads config.json and all headers, no tensor data, and checks them.

        Raises:
            CheckpointError: the folder cannot be used; the message names the file and, where there
                is one, the tensor.
        """
        config_path = folder / "config.json"
        content = read_bounded(config_path, MAX_CONFIG_NBYTES)
        config = parse_model_config(content, config_path)
        shards = read_shards(folder)
        return cls._join(folder, config, shards.tensors, content + shards.digest)

    @classmethod
    def _join(
        cls, folder: Path, config: ModelConfig, tensors: Tensors, identity: bytes
    ) -> "Checkpoint":
        spec = config.spec
        resident = list(resident_matrices(spec, config.dense_intermediate_size))
        vectors = list(resident_vectors(spec))
        experts = {layer: expert_matrices(spec, layer) for layer in spec.moe_layers}
        check_names(
            tensors,
            [*resident, *(m for layer in experts.values() for m in layer)],
            vectors,
            config,
            ignored=["lm_head"] if spec.tie_word_embeddings else [],
        )
        stored = {m.path: stored_matrix(m, tensors, config) for m in resident}
        stored_by_layer = {
            layer: {
                projection: stored_experts(m, spec.moe.num_experts, tensors, config)
                for projection, m in zip(PROJECTIONS, matrices, strict=True)
            }
            for layer, matrices in experts.items()
        }
        all_stored = [*stored.values(), *(m for e in stored_by_layer.values() for m in e.values())]
        dtype = MLX_DTYPES[common_scale_dtype(all_stored)]
        return cls(
            folder=folder,
            spec=spec,
            dtype=dtype,
            matrices=stored,
            vectors={v.name: stored_vector(v, tensors) for v in vectors},
            resident_nbytes=_resident_nbytes(stored.values(), vectors, dtype),
            experts=stored_by_layer,
            fingerprint=hashlib.sha256(identity).hexdigest(),
        )

    @property
    def expert_layers(self) -> tuple[ExpertLayer, ...]:
        """Where the routed experts are, one for each of `spec.moe_layers`, ascending."""
        return tuple(
            ExpertLayer(
                layer=layer,
                num_experts=self.spec.moe.num_experts,
                parts=tuple(
                    _expert_part(f"{projection}.{part}", tensor)
                    for projection, matrix in projections.items()
                    for part, tensor in zip(
                        ("weight", "scales", "biases"), matrix.tensors, strict=True
                    )
                ),
            )
            for layer, projections in self.experts.items()
        )

    def expert_quantization(self, layer: int, projection: str) -> Quantization:
        """How a projection (`gate_proj`, `up_proj`, `down_proj`) of a layer's experts is stored."""
        quantization = self.experts[layer][projection].quantization
        assert quantization is not None
        return quantization


def _expert_part(name: str, stacked: TensorInfo) -> ExpertPart:
    num_experts = stacked.shape[0]
    return ExpertPart(
        name=name,
        path=stacked.path,
        offset=stacked.offset,
        nbytes=stacked.nbytes // num_experts,
        shape=stacked.shape[1:],
        dtype=MLX_DTYPES[stacked.dtype],
    )


def _resident_nbytes(
    matrices: Iterable[StoredMatrix], vectors: Iterable[Vector], dtype: str
) -> int:
    itemsize = _ITEMSIZE[dtype]
    quantized = sum(t.nbytes for m in matrices if m.quantization is not None for t in m.tensors)
    # Whatever is not quantised becomes the type of the activations while it is loaded.
    dense = sum(prod(m.weight.shape) * itemsize for m in matrices if m.quantization is None)
    others = sum(prod(v.shape) * (4 if v.is_f32 else itemsize) for v in vectors)
    return quantized + dense + others
