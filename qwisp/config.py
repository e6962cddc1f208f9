"""What comes from the caller: engine settings and sampling. Never written after creation."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

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
    # A field that may be of several types has a fault for each; the first stands for all.
    first = {fault["loc"][:1]: fault for fault in reversed(invalid.errors())}
    return "; ".join(_describe_fault(settings, fault) for fault in reversed(first.values()))


def _describe_fault(settings: type[BaseModel], fault: ErrorDetails) -> str:
    if not fault["loc"]:
        return str(fault["ctx"]["error"])
    name = str(fault["loc"][0])
    if field := settings.model_fields.get(name):
        return f"{name}={fault['input']!r}: give {field.description}"
    close = difflib.get_close_matches(name, settings.model_fields, n=1)
    hint = f"did you mean {close[0]}?" if close else f"it has: {', '.join(settings.model_fields)}"
    return f"{name} is not a setting of {settings.__name__}; {hint}"


_CountOrAuto = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    Field(description='a whole number from 1 on, or "auto"'),
]


class SamplingParams(_Settings):
    """How the next token is chosen. The default is greedy."""

    temperature: Annotated[float, Field(ge=0, le=100, description="a number from 0 to 100")] = 0.0
    """0 takes the most likely token; above 0 samples from softmax(logits / temperature)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0, description="a number above 0 and up to 1")] = 1.0
    """Keep the smallest set of tokens whose probabilities add up to at least this."""
    top_k: Annotated[int, Field(ge=0, description="a whole number from 0 on")] = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0, description="a number from 0 to 1")] = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: Annotated[
        int, Field(ge=0, lt=2**64, description="a whole number from 0 to 2**64 - 1")
    ] = 0
    """Seed of the request's own generator: the same request gives the same samples."""

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is deterministic."""
        return self.temperature == 0.0


class EngineConfig(_Settings):
    """Settings of an engine. What is found out at load time is in `Plan`, never here."""

    capacity: _CountOrAuto = "auto"
    """Experts of each layer held in memory (C). "auto": as many as the memory budget allows."""
    memory_budget_bytes: _CountOrAuto = "auto"
    """Memory for weights, experts, states and scratch. "auto": a share of this machine's memory."""
    kv_budget_bytes: _CountOrAuto = "auto"
    """Memory for the K/V and GDN state of running requests. "auto": one request of full context."""
    prefill_chunk: Annotated[int, Field(ge=1, description="a whole number from 1 on")] = 2048
    """Tokens of one prefill call; chunk boundaries are multiples of it (part of `Numerics`)."""
    io_threads: Annotated[int, Field(ge=1, le=64, description="a whole number from 1 to 64")] = 4
    """Threads that read experts."""
    read_gbs_limit: Annotated[
        Annotated[float, Field(gt=0.0)] | None,
        Field(description="a number above 0, or None for no limit"),
    ] = None
    """Simulate a disk of this many GB/s (1e9 bytes) for expert reads; None: no limit."""
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Field(description='"auto", "float32", "float16" or "bfloat16"'),
    ] = "auto"
    """Type of the activations; it must be that of the checkpoint's scales ("auto")."""
    numerics: object | None = None
    """A `qwisp.kernels.numerics.Numerics` to use instead of this device's; for tests."""
    record_logits: Annotated[bool, Field(description="True or False")] = False
    """Fill `Completion.logits_digests`: one SHA-256 per generated token."""
    record_routes: Annotated[Path | None, Field(description="a path, or None for no trace")] = None
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
                f"kv_budget_bytes={part} is above memory_budget_bytes={whole}, "
                f"of which it is part; set it to {whole} or less"
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
