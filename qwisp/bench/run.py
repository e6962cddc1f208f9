"""Question: what does a bounded number of experts in memory cost, and does it change a bit?

At every capacity an engine is loaded, warmed up and timed. After all timing, L1 is checked: a
second engine per capacity records logits and is compared with the reference, which has every expert
resident. The two are apart because recording logits takes time that belongs to no figure.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from qwisp.bench.exactness import Completions, check_exactness, describe_reference
from qwisp.bench.machine import describe_machine, describe_source, describe_versions
from qwisp.bench.measure import MeasuredRequest, measure_request, sum_up
from qwisp.bench.progress import ProgressDisplay
from qwisp.bench.report import CapacityResult, Exactness, Reference, Report, Spread, Trial
from qwisp.bench.settings import RunPlan, RunSettings, plan_run, with_capacity
from qwisp.config import EngineConfig, SamplingParams
from qwisp.engine.engine import Engine
from qwisp.engine.plan import Plan

LoadEngine = Callable[[Path | None, EngineConfig, Callable[[int, int], None]], Engine]
"""`Engine.load`, or something that stands in for it."""

WARM_UP_TOKENS = 8
"""Generated from the first prompt before timing, for kernels that are made at their first use."""


@dataclass(frozen=True)
class _Timed:
    """What the timed trials at one capacity gave."""

    plan: Plan
    trials: tuple[Trial, ...]
    completions: tuple[Completions, ...]
    """One mapping for each trial."""
    peak_memory_bytes: int
    memory_before_bytes: int


class Run:
    """One run of the bench, from settings to report."""

    def __init__(
        self,
        settings: RunSettings,
        config: EngineConfig,
        progress: ProgressDisplay,
        load: LoadEngine = Engine.load,
    ) -> None:
        self._settings = settings
        self._config = config
        self._progress = progress
        self._load = load

    def execute(self) -> Report:
        """Measure, then check, and report.

        Raises:
            QwispError: the model or a setting cannot work, or a request failed.
        """
        started = time.monotonic()
        run_plan = plan_run(self._settings, self._config)
        self._progress.begin(self._num_requests(run_plan))
        timed = [self._time(plan) for plan in run_plan.measured]
        reference = self._record(run_plan.reference)
        results = []
        for each in timed:
            is_reference = each.plan.capacity == run_plan.reference.capacity
            recorded = None if is_reference else self._record(each.plan)
            results.append(
                _capacity_result(each, check_exactness(reference, recorded, each.completions))
            )
        return Report(
            is_exact=all(each.exactness.is_exact for each in results),
            model=str(self._settings.model or run_plan.reference.model),
            max_tokens=self._settings.max_tokens,
            seed=SamplingParams().seed,
            config=self._config,
            numerics_digest=run_plan.reference.numerics_digest,
            reference=Reference(
                plan=run_plan.reference,
                is_resident=run_plan.reference.is_resident,
                prompts=tuple(describe_reference(reference)),
            ),
            results=tuple(results),
            machine=describe_machine(run_plan.reference.device),
            versions=describe_versions(),
            source=describe_source(),
            wall_s=time.monotonic() - started,
        )

    def _num_requests(self, run_plan: RunPlan) -> int:
        num_prompts = len(self._settings.prompts)
        timed = len(run_plan.measured) * (1 + self._settings.trials * num_prompts)
        capacities = {plan.capacity for plan in (*run_plan.measured, run_plan.reference)}
        return timed + len(capacities) * num_prompts

    @contextmanager
    def _engine(self, plan: Plan, *, record_logits: bool = False) -> Iterator[Engine]:
        config = with_capacity(self._config, plan.capacity)
        if record_logits:
            config = EngineConfig(**{**dict(config), "record_logits": True})
        with self._progress.loading(f"load C={plan.capacity} (MiB)") as on_progress:
            engine = self._load(self._settings.model, config, on_progress)
        with engine:
            yield engine

    def _time(self, plan: Plan) -> _Timed:
        # The last engine is closed, but cycles may still hold its arrays and would count as ours.
        gc.collect()
        memory_before_bytes = mx.get_active_memory()
        prompts, capacity = self._settings.prompts, plan.capacity
        trials, completions = [], []
        with self._engine(plan) as engine:
            self._progress.show(f"C={capacity} warm-up")
            engine.generate(prompts[0].content, max_tokens=WARM_UP_TOKENS)
            self._progress.advance()
            for number in range(1, self._settings.trials + 1):
                label = f"C={capacity} trial {number} of {self._settings.trials}"
                self._progress.show(label)
                measured = list(self._measure(engine))
                trial = sum_up([each.result for each in measured])
                trials.append(trial)
                completions.append({each.result.prompt: each.completion for each in measured})
                self._progress.print(f"{label}: {_describe(trial)}")
            peak_memory_bytes = engine.stats().peak_memory_bytes
        return _Timed(
            plan, tuple(trials), tuple(completions), peak_memory_bytes, memory_before_bytes
        )

    def _measure(self, engine: Engine) -> Iterator[MeasuredRequest]:
        for prompt in self._settings.prompts:
            yield measure_request(engine, prompt, self._settings.max_tokens)
            self._progress.advance()

    def _record(self, plan: Plan) -> Completions:
        completions = {}
        with self._engine(plan, record_logits=True) as engine:
            for prompt in self._settings.prompts:
                self._progress.show(f"C={plan.capacity} logits of {prompt.name}")
                completions[prompt.name] = engine.generate(
                    prompt.content, max_tokens=self._settings.max_tokens
                )
                self._progress.advance()
        return completions


def _describe(trial: Trial) -> str:
    speed = "-" if trial.decode_tok_s is None else f"{trial.decode_tok_s:.1f}"
    return (
        f"{speed} tok/s, first token {trial.first_token_s * 1e3:.0f} ms, "
        f"{trial.bytes_per_token / 1e6:.2f} MB per token"
    )


def _capacity_result(timed: _Timed, exactness: Exactness) -> CapacityResult:
    trials = timed.trials
    return CapacityResult(
        plan=timed.plan,
        exactness=exactness,
        decode_tok_s=_spread_of_known([trial.decode_tok_s for trial in trials]),
        first_token_s=_spread([trial.first_token_s for trial in trials]),
        bytes_per_token=_spread([trial.bytes_per_token for trial in trials]),
        hit_rate=_spread([trial.hit_rate for trial in trials]),
        prefill_passes=_spread_of_known([trial.prefill_passes for trial in trials]),
        decode_passes=_spread([trial.decode_passes for trial in trials]),
        read_wait_share=_spread([trial.read_wait_share for trial in trials]),
        peak_memory_bytes=timed.peak_memory_bytes,
        memory_before_bytes=timed.memory_before_bytes,
        trials=trials,
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def _spread_of_known(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return _spread(known) if known else None
