"""From a checkpoint folder to a model that can run, within the plan's memory."""

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from qwisp.arena import ExpertArena, PreadReader, TraceWriter
from qwisp.config import EngineConfig
from qwisp.engine.checkpoint import Checkpoint
from qwisp.engine.model import Model
from qwisp.engine.plan import DeviceFacts, ModelFacts, Plan, plan
from qwisp.engine.resident import load_resident
from qwisp.engine.tokenizer import Tokenizer
from qwisp.errors import ConfigError
from qwisp.kernels.numerics import Numerics, device_numerics

logger = logging.getLogger(__name__)

EMBEDDED_MODEL = Path(__file__).parent.parent / "models" / "tiny"
"""The small trained model that comes with the package."""


@dataclass(frozen=True)
class LoadedModel:
    """Everything an engine needs to serve requests."""

    plan: Plan
    model: Model
    tokenizer: Tokenizer
    arena: ExpertArena


def load_model(
    folder: str | Path | None,
    config: EngineConfig,
    on_progress: Callable[[int, int], None] | None,
) -> LoadedModel:
    """Read headers, plan, then read the resident weights and make the arena.

    Call it on the thread that will compute: MLX arrays belong to the thread that evaluates them.

    Raises:
        CheckpointError: the folder cannot be used.
        ConfigError: a setting cannot work.
    """
    checkpoint = _open(folder)
    numerics = _numerics(config, checkpoint.dtype)
    planned = _plan(checkpoint, config, numerics)
    # The cache of freed buffers is not bounded by default; the plan counts it as scratch.
    mx.set_cache_limit(planned.scratch_bytes)
    mx.reset_peak_memory()
    spec = checkpoint.spec
    tokenizer = Tokenizer.load(checkpoint.folder, spec.eos_token_ids, spec.vocab_size)
    preloaded = planned.arena_bytes if planned.is_resident else 0
    total = planned.resident_bytes + preloaded

    def report(done: int, _: int) -> None:
        if on_progress is not None:
            on_progress(done, total)

    weights = load_resident(checkpoint, report)
    with contextlib.ExitStack() as undo:
        reader = PreadReader(config.io_threads, read_gbs_limit=config.read_gbs_limit)
        undo.callback(reader.close)
        trace = None
        if config.record_routes is not None:
            trace = TraceWriter.create(
                config.record_routes,
                fingerprint=checkpoint.fingerprint,
                num_experts=planned.num_experts,
                top_k=planned.top_k,
                layers=spec.moe_layers,
            )
            undo.callback(trace.close)
        arena = ExpertArena(checkpoint.expert_layers, planned.capacity, reader, trace=trace)
        if arena.is_resident:
            arena.preload(lambda done, _: report(planned.resident_bytes + done, total))
        undo.pop_all()
    logger.info("loaded %s", planned)
    return LoadedModel(planned, Model(checkpoint, weights, arena, numerics), tokenizer, arena)


def plan_model(folder: str | Path | None, config: EngineConfig) -> Plan:
    """What `load_model` would decide, from the headers alone. None: the embedded model.

    Raises:
        CheckpointError: the folder cannot be used.
        ConfigError: a setting cannot work.
    """
    checkpoint = _open(folder)
    return _plan(checkpoint, config, _numerics(config, checkpoint.dtype))


def _open(folder: str | Path | None) -> Checkpoint:
    return Checkpoint.open(EMBEDDED_MODEL if folder is None else Path(folder))


def _plan(checkpoint: Checkpoint, config: EngineConfig, numerics: Numerics) -> Plan:
    facts = ModelFacts(
        name=checkpoint.folder.name,
        spec=checkpoint.spec,
        dtype=checkpoint.dtype,
        resident_nbytes=checkpoint.resident_nbytes,
        expert_layers=checkpoint.expert_layers,
    )
    return plan(config, facts, DeviceFacts(numerics.device, _memory_bytes()), numerics)


def _memory_bytes() -> int:
    """The machine's memory, or its graphics card's where that is separate and smaller."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(host, int(mx.device_info().get("total_memory", host)))


def _numerics(config: EngineConfig, dtype: str) -> Numerics:
    injected = config.numerics
    if injected is None:
        return device_numerics(dtype=dtype, prefill_chunk=config.prefill_chunk)
    if not isinstance(injected, Numerics):
        raise ConfigError(
            f"numerics is a {type(injected).__name__}; give a qwisp.kernels.numerics.Numerics"
        )
    if injected.dtype != dtype:
        raise ConfigError(
            f"numerics.dtype={injected.dtype}, but the checkpoint's is {dtype}: use that"
        )
    default = EngineConfig.model_fields["prefill_chunk"].default
    if config.prefill_chunk not in (default, injected.prefill_chunk):
        raise ConfigError(
            f"prefill_chunk={config.prefill_chunk} and numerics.prefill_chunk="
            f"{injected.prefill_chunk} contradict each other; leave the first out"
        )
    return injected
