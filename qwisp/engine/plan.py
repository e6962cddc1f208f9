"""`plan()`: from a memory budget to a capacity. Pure; the loader allocates exactly what it says."""

from collections.abc import Sequence
from dataclasses import dataclass

from qwisp.arena.source import ExpertLayer
from qwisp.config import EngineConfig
from qwisp.engine.spec import ModelSpec
from qwisp.errors import ConfigError
from qwisp.kernels.gdn import SEGMENT_TOKENS
from qwisp.kernels.numerics import Numerics

AUTO_BUDGET_SHARE = 0.6
"""Share of the machine's memory that "auto" takes. The rest is not idle: it is the page cache in
front of the experts, and a machine that swaps is slower than any arena makes it fast."""

AUTO_STATE_SHARE = 0.125
"""Most of the budget that "auto" gives to the states of running requests."""

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class DeviceFacts:
    """What was found out about the machine."""

    name: str
    total_memory_bytes: int


@dataclass(frozen=True)
class ModelFacts:
    """What the checkpoint's headers say."""

    name: str
    spec: ModelSpec
    dtype: str
    resident_nbytes: int
    expert_layers: Sequence[ExpertLayer]


@dataclass(frozen=True)
class Plan:
    """Where the memory goes and which rules hold. All sizes in bytes."""

    model: str
    device: str
    capacity: int
    """Experts of each layer held in memory."""
    num_experts: int
    top_k: int
    num_moe_layers: int
    memory_budget_bytes: int
    resident_bytes: int
    arena_bytes: int
    state_budget_bytes: int
    """Limit of the K/V and GDN bytes of running requests."""
    kv_bytes_per_token: int
    gdn_bytes_per_lane: int
    max_context_tokens: int
    """Longest prompt plus generation that fits the model's context and the state budget."""
    scratch_bytes: int
    """Largest temporaries of a prefill chunk; also the limit of MLX's cache of free buffers."""
    numerics_digest: str

    @property
    def total_bytes(self) -> int:
        """Everything together; at most the budget."""
        return self.resident_bytes + self.arena_bytes + self.state_budget_bytes + self.scratch_bytes

    @property
    def is_resident(self) -> bool:
        """Whether every expert stays in memory."""
        return self.capacity == self.num_experts

    def lane_bytes(self, num_tokens: int) -> int:
        """State bytes of a request of `num_tokens`, prompt and generation together."""
        return self.gdn_bytes_per_lane + num_tokens * self.kv_bytes_per_token

    def __str__(self) -> str:
        gib = 1 << 30
        parts = {
            "weights": self.resident_bytes,
            "experts": self.arena_bytes,
            "states": self.state_budget_bytes,
            "scratch": self.scratch_bytes,
        }
        memory = ", ".join(f"{name} {nbytes / gib:.2f}" for name, nbytes in parts.items())
        return (
            f"{self.model} on {self.device}: {self.capacity} of {self.num_experts} experts "
            f"of a layer in memory, {self.total_bytes / gib:.2f} of "
            f"{self.memory_budget_bytes / gib:.2f} GiB planned ({memory}), "
            f"context {self.max_context_tokens} tokens, numerics {self.numerics_digest[:12]}"
        )


def plan(config: EngineConfig, model: ModelFacts, device: DeviceFacts, numerics: Numerics) -> Plan:
    """Resolve every "auto" and check that the whole fits.

    Raises:
        ConfigError: a setting cannot work; the message gives the value that would.
    """
    _check_dtype(config, model)
    if config.memory_budget_bytes != "auto":
        budget = config.memory_budget_bytes
    elif config.capacity == "auto":
        budget = int(device.total_memory_bytes * AUTO_BUDGET_SHARE)
    else:
        # Whoever names a capacity has chosen; all that can be checked is that the machine has it.
        budget = device.total_memory_bytes
    slot_bytes = sum(layer.expert_nbytes for layer in model.expert_layers)
    fixed = _fixed(config, model, numerics, budget)
    capacity = _capacity(config, model.spec, budget, fixed.total_bytes, slot_bytes)
    if capacity is None:
        needed = _least_budget(config, model, numerics, slot_bytes)
        raise ConfigError(
            f"memory_budget_bytes={budget} is too small: weights, states and scratch take "
            f"{fixed.total_bytes} and top_k={model.spec.moe.top_k} experts of each layer "
            f"{model.spec.moe.top_k * slot_bytes}; set it to {needed} or more"
        )
    return Plan(
        model=model.name,
        device=device.name,
        capacity=capacity,
        num_experts=model.spec.moe.num_experts,
        top_k=model.spec.moe.top_k,
        num_moe_layers=len(model.expert_layers),
        memory_budget_bytes=budget,
        resident_bytes=model.resident_nbytes,
        arena_bytes=capacity * slot_bytes,
        state_budget_bytes=fixed.state_budget_bytes,
        kv_bytes_per_token=fixed.kv_bytes_per_token,
        gdn_bytes_per_lane=fixed.gdn_bytes_per_lane,
        max_context_tokens=fixed.context_tokens,
        scratch_bytes=fixed.scratch_bytes,
        numerics_digest=numerics.digest,
    )


@dataclass(frozen=True)
class _Fixed:
    """What memory takes besides the experts, at one budget."""

    resident_bytes: int
    state_budget_bytes: int
    kv_bytes_per_token: int
    gdn_bytes_per_lane: int
    context_tokens: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.state_budget_bytes + self.scratch_bytes


def _fixed(config: EngineConfig, model: ModelFacts, numerics: Numerics, budget: int) -> _Fixed:
    spec, itemsize = model.spec, _ITEMSIZE[model.dtype]
    kv_per_token, gdn_per_lane = _state_sizes(spec, itemsize)
    full_context = gdn_per_lane + spec.max_position_embeddings * kv_per_token
    state_budget = (
        min(full_context, int(budget * AUTO_STATE_SHARE))
        if config.kv_budget_bytes == "auto"
        else config.kv_budget_bytes
    )
    room = max(0, state_budget - gdn_per_lane)
    context = min(spec.max_position_embeddings, room // max(1, kv_per_token))
    return _Fixed(
        resident_bytes=model.resident_nbytes,
        state_budget_bytes=state_budget,
        kv_bytes_per_token=kv_per_token,
        gdn_bytes_per_lane=gdn_per_lane,
        context_tokens=context,
        scratch_bytes=_scratch(spec, numerics, context, itemsize),
    )


def _least_budget(
    config: EngineConfig, model: ModelFacts, numerics: Numerics, slot_bytes: int
) -> int:
    """The smallest budget that holds top_k experts per layer.

    What is fixed grows with the budget, but by less than the budget does, so repeating the sum
    rises to the answer.
    """
    budget, needed = 0, 1
    while needed > budget:
        budget = needed
        fixed = _fixed(config, model, numerics, budget).total_bytes
        needed = fixed + model.spec.moe.top_k * slot_bytes
    return budget


def _check_dtype(config: EngineConfig, model: ModelFacts) -> None:
    if config.dtype not in ("auto", model.dtype):
        raise ConfigError(
            f"dtype={config.dtype}: the scales of {model.name} are {model.dtype}, and activations "
            f'of another type would convert them at every call; use dtype="{model.dtype}" or "auto"'
        )


def _capacity(
    config: EngineConfig, spec: ModelSpec, budget: int, fixed: int, slot_bytes: int
) -> int | None:
    """Experts per layer, or None if "auto" cannot hold even top_k of them."""
    top_k, num_experts = spec.moe.top_k, spec.moe.num_experts
    most = min(num_experts, max(0, budget - fixed) // slot_bytes)
    capacity = config.capacity
    if capacity == "auto":
        return most if most >= top_k else None
    if capacity < top_k:
        raise ConfigError(
            f"capacity={capacity} is below top_k={top_k}: one token needs {top_k} experts of a "
            f"layer at once; set capacity to {top_k} or more"
        )
    if capacity > num_experts:
        raise ConfigError(
            f"capacity={capacity} is above the model's {num_experts} experts per layer; "
            f"set capacity to {num_experts} or less"
        )
    if capacity > most:
        raise ConfigError(
            f"capacity={capacity} needs {fixed + capacity * slot_bytes} bytes with weights, states "
            f"and scratch; memory_budget_bytes={budget} allows capacity {most}: set it to that or "
            "less, or lower kv_budget_bytes"
        )
    return capacity


def _state_sizes(spec: ModelSpec, itemsize: int) -> tuple[int, int]:
    """K/V bytes per token, and GDN bytes per lane, over all layers."""
    attention, gdn = spec.attention, spec.gdn
    num_attention = sum(layer.mixer == "attention" for layer in spec.layers)
    kv = num_attention * 2 * attention.num_kv_heads * attention.head_dim * itemsize
    if gdn is None:
        return kv, 0
    conv = (gdn.conv_taps - 1) * gdn.conv_channels * itemsize
    recurrence = gdn.num_value_heads * gdn.value_head_dim * gdn.key_head_dim * 4
    return kv, (len(spec.layers) - num_attention) * (conv + recurrence)


def _scratch(spec: ModelSpec, numerics: Numerics, context: int, itemsize: int) -> int:
    """Largest temporaries of a prefill chunk: experts' rows, a tile's scores, or the recurrence."""
    tokens = min(numerics.prefill_chunk, spec.max_position_embeddings)
    moe = spec.moe
    expert_rows = tokens * moe.top_k * (2 * spec.hidden_size + 3 * moe.intermediate_size) * itemsize
    tile = min(numerics.attention_tile, tokens)
    scores = 2 * tile * context * spec.attention.num_heads * itemsize
    return max(expert_rows, scores, _recurrence(spec, tokens, itemsize))


def _recurrence(spec: ModelSpec, tokens: int, itemsize: int) -> int:
    """A GDN layer's projections and convolution of a chunk, and the states of two segments."""
    gdn = spec.gdn
    if gdn is None:
        return 0
    state = gdn.num_value_heads * gdn.value_head_dim * gdn.key_head_dim * 4
    rows = 6 * tokens * gdn.conv_channels * itemsize
    return rows + 2 * SEGMENT_TOKENS * 2 * state
