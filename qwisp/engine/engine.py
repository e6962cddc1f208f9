"""The public engine: what a caller can ask of a loaded model, from any thread."""

import atexit
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from qwisp.config import EngineConfig, SamplingParams
from qwisp.engine.handle import Handle, TokenStream
from qwisp.engine.plan import Plan
from qwisp.engine.stop_strings import StopMatcher
from qwisp.engine.worker import Worker
from qwisp.errors import RequestError
from qwisp.types import Completion, EngineStats, Prompt, Request

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Engine:
    """A loaded model that generates. Create it with `Engine.load`, close it or use it in a `with`
    block.

    All computation happens on one thread of the engine's own, so every method may be called from
    any thread. Requests are served first come, first served (L4); each one ends, one way or another
    (L5). MLX's allocator belongs to the process: its cache limit is set by the engine loaded last,
    and the peak in `stats()` includes what else the process computes.
    """

    def __init__(
        self, model: str | Path | None, config: EngineConfig, on_progress: OnProgress | None
    ) -> None:
        """Use `Engine.load`."""
        self.config = config
        self._worker = Worker(model, config, on_progress)
        self._plan = self._worker.loaded.plan
        # A process must not exit while a thread computes: MLX's state would be torn down under it.
        atexit.register(self.close)

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Load a checkpoint folder; None is the small model that comes with the package.

        `on_progress` is called on the engine's thread with (bytes done, bytes in all).

        Raises:
            CheckpointError: the folder cannot be used.
            ConfigError: a setting cannot work with this model on this machine.
            DeviceError: this machine's device is not one whose rules are known.
            ExpertReadError: an expert could not be read.
            TraceError: the trace file cannot be written.
        """
        return cls(model, config or EngineConfig(), on_progress)

    @property
    def plan(self) -> Plan:
        """What was decided at load: capacity, memory, rules."""
        return self._plan

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """Generate to the end and return the whole.

        Raises:
            RequestError: the request can never be served.
            EngineClosed: the engine was closed.
            QwispError: the request failed on the way.
        """
        (completion,) = self.run([_request(prompt, max_tokens, sampling, stop)])
        if completion.error is not None:
            raise completion.error
        return completion

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
    ) -> TokenStream:
        """An iterator of TokenEvent, as tokens are generated. Leaving it early cancels the request.

        Raises:
            RequestError: the request can never be served.
            EngineClosed: the engine was closed.
        """
        self._check_may_wait()
        return TokenStream(self.submit(_request(prompt, max_tokens, sampling, stop)))

    def submit(self, request: Request) -> Handle:
        """Queue a request and return at once.

        Raises:
            RequestError: the request can never be served; the message has the numbers.
            EngineClosed: the engine was closed.
        """
        tokenizer = self._worker.loaded.tokenizer
        prompt_ids = tokenizer.encode(request.prompt)
        self._check_fits(request, prompt_ids)
        StopMatcher(request.stop)
        if request.stop and not tokenizer.has_text:
            raise RequestError(
                f"stop={list(request.stop)!r}: the model folder has no tokenizer, so there is no "
                "text to find stop strings in; leave stop empty"
            )
        handle = Handle(request, prompt_ids, time.monotonic())
        self._worker.line.add(handle)
        return handle

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Serve several requests and return their completions in the order given.

        A request that fails on the way has its error in its completion. An interrupt cancels all.

        Raises:
            RequestError: one of them can never be served; the others are cancelled.
            EngineClosed: the engine was closed.
        """
        self._check_may_wait()
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(self.submit(request))
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def stats(self) -> EngineStats:
        """Counters since load, as they stand now or stood when the engine was closed."""
        return self._worker.stats()

    def check(self) -> None:
        """Verify the arena's invariants (A1-A5). Call it while no request runs.

        Raises:
            InvariantError: one does not hold; the message starts with its id.
            EngineClosed: the engine was closed.
        """
        self._worker.loaded.arena.check()

    def close(self) -> None:
        """End every request as cancelled, then free the model. Closing twice is fine."""
        atexit.unregister(self.close)
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_may_wait(self) -> None:
        if self._worker.is_current_thread:
            raise RequestError(
                "a callback on the engine's thread cannot wait for another request, which needs "
                "that thread; use submit() there and wait elsewhere"
            )

    def _check_fits(self, request: Request, prompt_ids: Sequence[int]) -> None:
        plan, num_tokens = self.plan, len(prompt_ids) + request.max_tokens
        if num_tokens > plan.max_context_tokens:
            raise RequestError(
                f"a prompt of {len(prompt_ids)} tokens and max_tokens={request.max_tokens} are "
                f"{num_tokens} together; this engine holds {plan.max_context_tokens} "
                f"({plan.lane_bytes(num_tokens)} of {plan.state_budget_bytes} bytes of state): "
                "shorten one, or raise kv_budget_bytes if the model's context allows"
            )


def _request(
    prompt: Prompt, max_tokens: int, sampling: SamplingParams | None, stop: Sequence[str]
) -> Request:
    return Request(prompt, max_tokens, sampling or SamplingParams(), stop)
