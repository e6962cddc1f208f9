"""Runs MoE models whose experts stay on flash, bit for bit as if everything were in memory."""

from qwisp.config import EngineConfig, SamplingParams
from qwisp.engine.engine import Engine
from qwisp.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineClosed,
    ExpertReadError,
    InvariantError,
    QwispError,
    RequestError,
    TraceError,
)
from qwisp.types import Completion, EngineStats, Request, TokenEvent

__version__ = "0.1.0"

__all__ = [
    "CheckpointError", "Completion", "ConfigError", "DeviceError", "Engine", "EngineClosed",
    "EngineConfig", "EngineStats", "ExpertReadError", "InvariantError", "QwispError", "Request",
    "RequestError", "SamplingParams", "TokenEvent", "TraceError",
]  # fmt: skip
