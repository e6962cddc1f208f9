"""What one run of the bench is asked to do. The engine's own settings are in `EngineConfig`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qwisp.bench.prompts import BUILT_IN, BenchPrompt
from qwisp.config import EngineConfig
from qwisp.engine.loading import plan_model
from qwisp.engine.plan import Plan
from qwisp.errors import ConfigError

Capacity = int | Literal["auto"]

DEFAULT_SHARES = (8, 4, 2, 1)
"""Without capacities given: an eighth, a quarter, a half and all of a layer's experts."""


@dataclass(frozen=True)
class RunSettings:
    """One run: which model, at which capacities, on which prompts, how often."""

    model: Path | None = None
    """None: the embedded model."""
    capacities: tuple[Capacity, ...] = ()
    """Empty: see `DEFAULT_SHARES`."""
    prompts: tuple[BenchPrompt, ...] = BUILT_IN
    max_tokens: int = 16
    trials: int = 3

    def __post_init__(self) -> None:
        for name in ("max_tokens", "trials"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is below 1; set it to 1 or more")
        if not self.prompts:
            raise ConfigError("there is no prompt to run; give at least one")


@dataclass(frozen=True)
class RunPlan:
    """What a run will load, decided and checked before any weight is read."""

    reference: Plan
    """Everything resident or, where memory does not allow it, as much as it does."""
    measured: tuple[Plan, ...]
    """One for each capacity, ascending."""


def plan_run(settings: RunSettings, config: EngineConfig) -> RunPlan:
    """Resolve the capacities of a run.

    Raises:
        CheckpointError: the model folder cannot be used.
        ConfigError: a capacity cannot work with this model on this machine.
    """

    def plan_at(capacity: Capacity) -> Plan:
        return plan_model(settings.model, with_capacity(config, capacity))

    reference = plan_at("auto")
    asked = settings.capacities or default_capacities(reference)
    plans = {plan.capacity: plan for plan in map(plan_at, asked)}
    return RunPlan(reference, tuple(plans[capacity] for capacity in sorted(plans)))


def default_capacities(reference: Plan) -> Sequence[int]:
    """Shares of the model's experts, none below top_k or above what the reference holds."""
    return [
        min(max(reference.num_experts // share, reference.top_k), reference.capacity)
        for share in DEFAULT_SHARES
    ]


def with_capacity(config: EngineConfig, capacity: Capacity) -> EngineConfig:
    """The same settings at another capacity."""
    return EngineConfig(**{**dict(config), "capacity": capacity})
