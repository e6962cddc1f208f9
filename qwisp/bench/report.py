"""The report of a run: what the last line of stdout holds, as a versioned schema."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from qwisp.config import EngineConfig
from qwisp.engine.plan import Plan
from qwisp.types import EngineStats


class Record(BaseModel):
    """A frozen part of a report; an unknown name is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )


class PhaseCounters(Record):
    """How far the counters of `EngineStats` moved in one phase of one request."""

    bytes_read: int
    reads: int
    expert_hits: int
    expert_misses: int
    layer_steps: int
    split_layer_steps: int
    passes: int
    read_wait_s: float
    compute_wait_s: float

    @classmethod
    def between(cls, before: EngineStats, after: EngineStats) -> Self:
        """The movement from one snapshot to a later one."""
        return cls(
            **{name: getattr(after, name) - getattr(before, name) for name in cls.model_fields}
        )

    @classmethod
    def total(cls, parts: list[Self]) -> Self:
        """The movement of several phases together."""
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in cls.model_fields}
        )


class RequestResult(Record):
    """One prompt, generated once."""

    prompt: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    prefill_s: float
    first_token_s: float
    """From the start of work to the first token, prefill included."""
    decode_s: float
    """From the first token to the last: one step fewer than tokens."""
    prefill: PhaseCounters
    """All prompt tokens but the last."""
    decode: PhaseCounters
    """The last prompt token and every generated one but the last: one step per generated token."""


class Trial(Record):
    """All prompts once, one after another, and what they add up to."""

    requests: tuple[RequestResult, ...]
    decode_tok_s: float | None
    """None when no prompt gave two tokens or more."""
    first_token_s: float
    """Mean over the prompts."""
    bytes_per_token: float
    """Demanded expert bytes (A4) per decode step."""
    hit_rate: float
    """Of decode: experts that were in a slot when a layer step asked for them."""
    prefill_passes: float | None
    """Passes per layer step of prefill; None when no prompt has two tokens or more."""
    decode_passes: float
    """Passes per layer step of decode."""
    read_wait_share: float
    """Of decode: time in which the engine stood still for reads."""


class Spread(Record):
    """One figure over the trials."""

    median: float
    low: float
    high: float


class Difference(Record):
    """Where a run first left the reference."""

    prompt: str
    token_idx: int | None
    """None when it is not a token that differs."""
    what: str


class Exactness(Record):
    """Whether a capacity keeps L1: its token ids and logits bytes equal those of the reference."""

    is_exact: bool
    is_reference: bool
    """The reference is compared with its own timed trials only."""
    tokens_compared: int
    """Logits rows whose digests were compared."""
    differences: tuple[Difference, ...]
    """The first of each prompt that has any."""


class CapacityResult(Record):
    """Everything measured at one capacity."""

    plan: Plan
    exactness: Exactness
    decode_tok_s: Spread | None
    first_token_s: Spread
    bytes_per_token: Spread
    hit_rate: Spread
    prefill_passes: Spread | None
    decode_passes: Spread
    read_wait_share: Spread
    peak_memory_bytes: int
    """Peak of MLX's allocator from just before this engine was loaded to the end of its trials."""
    memory_before_bytes: int
    """What MLX held before that; above 0, the peak contains something of another engine's."""
    trials: tuple[Trial, ...]


class ReferencePrompt(Record):
    """What the reference run made of a prompt."""

    prompt: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    logits_digest: str
    """SHA-256 over the digests of all steps. With equal numerics it is equal on machines with the
    same kind of processor, MLX build and MLX environment variables (docs/exactness.md)."""


class Reference(Record):
    """The run that every capacity is compared with."""

    plan: Plan
    is_resident: bool
    """False where memory cannot hold every expert: the largest capacity stands in then."""
    prompts: tuple[ReferencePrompt, ...]


class Machine(Record):
    """Where it was measured."""

    platform: str
    processor: str
    cpu_count: int
    memory_bytes: int
    mlx_device: str


class Versions(Record):
    """With what it was measured."""

    qwisp: str
    mlx: str
    python: str


class Source(Record):
    """The checkout the code came from."""

    commit: str
    is_dirty: bool


class Report(Record):
    """One run of the bench."""

    schema_version: Literal[1] = 1
    command: Literal["run"] = "run"
    is_exact: bool
    """Whether L1 held at every capacity."""
    model: str
    max_tokens: int
    seed: int
    config: EngineConfig
    numerics_digest: str
    reference: Reference
    results: tuple[CapacityResult, ...]
    """By ascending capacity."""
    machine: Machine
    versions: Versions
    source: Source | None
    """None for an installed package."""
    wall_s: float
