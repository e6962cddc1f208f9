"""Words shared by all packages: requests and what comes back. Knows no arrays, no files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qwisp.config import SamplingParams
from qwisp.errors import QwispError, RequestError

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""Text, token ids, or chat messages (`{"role": ..., "content": ...}`)."""

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class Request:
    """One thing to generate."""

    prompt: Prompt
    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()
    """Generation ends before the first of these strings; it is not part of the text."""
    deadline_s: float | None = None
    """Seconds from submission after which the request ends with what it has."""
    on_prefill: Callable[[int, int], None] | None = None
    """Called on the engine's thread with (tokens done, tokens in all) while the prompt is computed:
    after every layer, the layers of a chunk counted in proportion. What it raises ends the
    request."""

    def __post_init__(self) -> None:
        """Refuse values of the wrong kind here, where the caller sees them.

        Raises:
            RequestError: a field cannot work.
        """
        if not _is_number(self.max_tokens, int) or self.max_tokens < 1:
            raise RequestError(f"max_tokens={self.max_tokens!r}: give a whole number, 1 or more")
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(f"sampling={self.sampling!r}: give a SamplingParams")
        if self.deadline_s is not None and not (
            _is_number(self.deadline_s, (int, float)) and self.deadline_s > 0
        ):
            raise RequestError(f"deadline_s={self.deadline_s!r}: give seconds above 0, or None")
        if self.on_prefill is not None and not callable(self.on_prefill):
            raise RequestError(f"on_prefill={self.on_prefill!r}: give a function, or None")


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. `text` is what became certain with it: it may be empty."""

    token_id: int
    text: str
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one request."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    """From the start of work on the request to its first token."""
    decode_s: float = 0.0
    """From the first token to the last."""


@dataclass(frozen=True)
class Completion:
    """The whole result of a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: QwispError | None
    prompt_tokens: int
    timings: Timings
    numerics_digest: str
    logits_digests: tuple[str, ...] = ()
    """SHA-256 hex digests of each step's logits row, with `EngineConfig(record_logits=True)`."""


@dataclass(frozen=True)
class LayerStats:
    """Counters of one layer's experts since load."""

    layer: int
    bytes_read: int
    expert_hits: int
    expert_misses: int
    layer_steps: int
    split_layer_steps: int
    passes: int


@dataclass(frozen=True)
class EngineStats:
    """Counters since load. A snapshot: it does not change."""

    bytes_read: int
    """Payload of the expert reads that a layer step demanded (A4)."""
    bytes_transferred: int
    """Bytes that reads moved in all, with what retries and early reads added."""
    bytes_speculative: int
    """Of these, bytes read before any layer step asked for them (loading a resident arena)."""
    reads: int
    expert_hits: int
    expert_misses: int
    layer_steps: int
    split_layer_steps: int
    """Layer steps that took more than one pass because their union was above capacity."""
    passes: int
    read_wait_s: float
    """Time the engine stood still for reads."""
    compute_wait_s: float
    """Time the engine stood still for computation: routes, fences and tokens."""
    tokens_decoded: int
    tokens_prefilled: int
    kv_bytes_reserved: int
    """K/V and GDN bytes reserved right now."""
    peak_memory_bytes: int
    """Peak of MLX's allocator, which is the process's, since the last load in this process."""
    layers: tuple[LayerStats, ...]
