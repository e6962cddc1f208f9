"""What comes from the caller: engine settings and sampling. Never written after creation."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qwisp.errors import ConfigError

_ENVIRONMENT = {
    "QWISP_CAPACITY": "capacity",
    "QWISP_MEMORY_BUDGET_BYTES": "memory_budget_bytes",
    "QWISP_IO_THREADS": "io_threads",
    "QWISP_READ_GBS_LIMIT": "read_gbs_limit",
}
"""Every environment variable there is, and the setting of `EngineConfig` it fills."""


class _Settings(BaseModel):
    """A frozen record of settings; an unknown name or a bad value raises ConfigError."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as invalid:
            raise ConfigError(_describe(type(self), invalid)) from None


def _describe(settings: type[BaseModel], invalid: ValidationError) -> str:
    faults = []
    for fault in invalid.errors():
        name = ".".join(str(part) for part in fault["loc"]) or settings.__name__
        if fault["type"] == "extra_forbidden":
            known = ", ".join(settings.model_fields)
            faults.append(f"{name} is not a setting of {settings.__name__}; it has: {known}")
        else:
            faults.append(f"{name}={fault['input']!r}: {fault['msg']}")
    return "; ".join(faults)


class SamplingParams(_Settings):
    """How the next token is chosen. The default is greedy."""

    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """0 takes the most likely token; above 0 samples from softmax(logits / temperature)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of tokens whose probabilities add up to at least this."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of the request's own generator: the same request gives the same samples."""

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is deterministic."""
        return self.temperature == 0.0


class EngineConfig(_Settings):
    """Settings of an engine. What is found out at load time is in `Plan`, never here."""

    capacity: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Experts of each layer held in memory (C). "auto": as many as the memory budget allows."""
    memory_budget_bytes: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Memory for weights, experts, states and scratch. "auto": a share of this machine's memory."""
    kv_budget_bytes: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Memory for the K/V and GDN state of running requests. "auto": one request of full context."""
    prefill_chunk: Annotated[int, Field(ge=1)] = 2048
    """Tokens of one prefill call; chunk boundaries are multiples of it (part of `Numerics`)."""
    io_threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Threads that read experts."""
    read_gbs_limit: Annotated[float, Field(gt=0.0)] | None = None
    """Simulate a disk of this many GB/s (1e9 bytes) for expert reads; None: no limit."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of the activations; it must be that of the checkpoint's scales ("auto")."""
    numerics: object | None = None
    """A `qwisp.kernels.numerics.Numerics` to use instead of this device's; for tests."""
    record_logits: bool = False
    """Fill `Completion.logits_digests`: one SHA-256 per generated token."""
    record_routes: Path | None = None
    """Write the routed expert ids of every layer step to this trace file."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Settings from `QWISP_*` variables, the defaults for the rest. For command lines only.

        Args:
            environ: None is the environment of this process. An empty value counts as not set.

        Raises:
            ConfigError: a value is not one its setting takes; the message names the variable.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for variable, field in _ENVIRONMENT.items():
            text = environ.get(variable, "").strip()
            if not text:
                continue
            values[field] = _number(text)
            try:
                cls(**{field: values[field]})
            except ConfigError as invalid:
                raise ConfigError(f"environment variable {variable}: {invalid}") from None
        return cls(**values)

    @model_validator(mode="before")
    @classmethod
    def _accept_path_text(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("record_routes"), str):
            return {**values, "record_routes": Path(values["record_routes"])}
        return values

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        part, whole = self.kv_budget_bytes, self.memory_budget_bytes
        if part != "auto" and whole != "auto" and part > whole:
            raise ValueError(
                f"kv_budget_bytes={part} is above memory_budget_bytes={whole}, of which it is part"
            )
        return self


def _number(text: str) -> int | float | str:
    """The number a text spells, or the text itself for the settings to judge."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
