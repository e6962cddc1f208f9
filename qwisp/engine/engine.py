"""The public engine: loads a checkpoint, serves requests from any thread, counts what happened."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import mlx.core as mx

from qwisp.config import EngineConfig, SamplingParams
from qwisp.engine.generation import Counters, Generation
from qwisp.engine.handle import Handle
from qwisp.engine.loading import LoadedModel, load_model
from qwisp.engine.plan import Plan
from qwisp.engine.stop_strings import StopMatcher
from qwisp.errors import EngineClosed, QwispError, RequestError
from qwisp.types import Completion, EngineStats, Prompt, Request, Timings, TokenEvent

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Engine:
    """A loaded model that generates. Create it with `Engine.load`, close it or use it in a `with`
    block.

    All computation happens on one thread of the engine's own, so every method may be called from
    any thread. Requests are served first come, first served (L4); each one ends, one way or another
    (L5).
    """

    def __init__(
        self, model: str | Path | None, config: EngineConfig, on_progress: OnProgress | None
    ):
        """Use `Engine.load`."""
        self.config = config
        self._inbox: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._submit_lock = threading.Lock()
        self._is_closed = False
        self._serving: Handle | None = None
        self._counters = Counters()
        self._load_error: BaseException | None = None
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._main, args=(model, on_progress, ready), name="qwisp-engine", daemon=True
        )
        self._thread.start()
        ready.wait()
        if self._load_error is not None:
            self._thread.join()
            raise self._load_error

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
        """
        return cls(model, config or EngineConfig(), on_progress)

    @property
    def plan(self) -> Plan:
        """What was decided at load: capacity, memory, rules."""
        return self._loaded.plan

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
            QwispError: the request failed on the way.
        """
        completion = self.submit(_request(prompt, max_tokens, sampling, stop)).result()
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
    ) -> Iterator[TokenEvent]:
        """Tokens as they are generated. Closing the iterator early cancels the request.

        Raises:
            RequestError: the request can never be served.
            QwispError: the request failed on the way.
        """
        handle = self.submit(_request(prompt, max_tokens, sampling, stop))
        return _stream(handle)

    def submit(self, request: Request) -> Handle:
        """Queue a request and return at once.

        Raises:
            RequestError: the request can never be served; the message has the numbers.
            EngineClosed: the engine was closed.
        """
        prompt_ids = self._loaded.tokenizer.encode(request.prompt)
        self._check_fits(request, prompt_ids)
        self._check_stop(request)
        handle = Handle(request, prompt_ids, time.monotonic())
        with self._submit_lock:
            if self._is_closed:
                raise EngineClosed("the engine is closed and takes no more requests")
            self._inbox.put(handle)
        return handle

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Serve several requests and return their completions in the order given.

        A request that fails on the way has its error in its completion.

        Raises:
            RequestError: one of them can never be served; none was started then.
        """
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(self.submit(request))
        except QwispError:
            for handle in handles:
                handle.cancel()
            raise
        return [handle.result() for handle in handles]

    def stats(self) -> EngineStats:
        """Counters since load, as they stand now."""
        arena, counters = self._loaded.arena.stats(), self._counters
        return EngineStats(
            bytes_read=arena.bytes_read,
            bytes_transferred=arena.bytes_transferred,
            bytes_speculative=arena.bytes_speculative,
            reads=arena.reads,
            expert_hits=arena.expert_hits,
            expert_misses=arena.expert_misses,
            layer_steps=arena.layer_steps,
            split_layer_steps=arena.split_layer_steps,
            passes=arena.passes,
            read_wait_s=arena.read_wait_s,
            compute_wait_s=arena.compute_wait_s
            + self._loaded.model.compute_wait_s
            + counters.compute_wait_s,
            tokens_decoded=counters.tokens_decoded,
            tokens_prefilled=counters.tokens_prefilled,
            kv_bytes_reserved=counters.kv_bytes_reserved,
            peak_memory_bytes=mx.get_peak_memory(),
            layers=arena.layers,
        )

    def check(self) -> None:
        """Verify the arena's invariants (A1-A5). Call it while no request runs.

        Raises:
            InvariantError: one does not hold; the message starts with its id.
        """
        self._loaded.arena.check()

    def close(self) -> None:
        """End every request as cancelled, then free the model. Closing twice is fine."""
        with self._submit_lock:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_fits(self, request: Request, prompt_ids: Sequence[int]) -> None:
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens={request.max_tokens}: ask for 1 token or more")
        plan, num_tokens = self.plan, len(prompt_ids) + request.max_tokens
        if num_tokens > plan.max_context_tokens:
            raise RequestError(
                f"a prompt of {len(prompt_ids)} tokens and max_tokens={request.max_tokens} are "
                f"{num_tokens} together; this engine holds {plan.max_context_tokens} "
                f"({plan.lane_bytes(num_tokens)} of {plan.state_budget_bytes} bytes of state): "
                "shorten one, or raise kv_budget_bytes if the model's context allows"
            )

    def _check_stop(self, request: Request) -> None:
        StopMatcher(request.stop)
        if request.stop and not self._loaded.tokenizer.has_text:
            raise RequestError(
                f"stop={list(request.stop)!r}: the model folder has no tokenizer, so there is no "
                "text to find stop strings in; leave stop empty"
            )

    def _main(
        self, model: str | Path | None, on_progress: OnProgress | None, ready: threading.Event
    ) -> None:
        """The engine's thread: everything that touches MLX happens here."""
        try:
            self._loaded: LoadedModel = load_model(model, self.config, on_progress)
        except BaseException as error:
            self._load_error = error
            return
        finally:
            ready.set()
        try:
            self._serve()
        except BaseException as fault:
            self._shut_down(fault)
            raise
        self._shut_down(None)

    def _serve(self) -> None:
        """Serve one request after another until `close` puts None in the inbox."""
        while (handle := self._inbox.get()) is not None:
            self._serving = handle
            generation = Generation(
                handle,
                self._loaded.model,
                self._loaded.tokenizer,
                self._counters,
                lookahead=self._loaded.arena.is_resident,
                record_logits=self.config.record_logits,
            )
            while not _step(generation):
                if self._is_closed:
                    handle.cancel()
            self._serving = None

    def _shut_down(self, fault: BaseException | None) -> None:
        """End every open request and free the files; `fault` is ours, if one ended the thread."""
        with self._submit_lock:
            self._is_closed = True
        digest = self._loaded.model.numerics.digest
        if self._serving is not None:
            self._serving.finish(_ended(self._serving, digest, _engine_fault(fault)))
        while not self._inbox.empty():
            handle = self._inbox.get()
            if handle is not None:
                handle.finish(
                    _ended(handle, digest, None if fault is None else _engine_fault(fault))
                )
        self._loaded.arena.close()


def _step(generation: Generation) -> bool:
    """Advance a request by one layer of prefill or one token; True when it has ended."""
    try:
        return generation.advance()
    except QwispError as error:
        generation.fail(error)
        return True


def _request(
    prompt: Prompt, max_tokens: int, sampling: SamplingParams | None, stop: Sequence[str]
) -> Request:
    return Request(prompt, max_tokens, sampling or SamplingParams(), stop)


def _stream(handle: Handle) -> Iterator[TokenEvent]:
    try:
        yield from handle
    finally:
        handle.cancel()


def _engine_fault(fault: BaseException | None) -> EngineClosed:
    error = EngineClosed(f"the engine stopped on a fault of its own: {fault!r}")
    error.__cause__ = fault
    return error


def _ended(handle: Handle, numerics_digest: str, error: EngineClosed | None) -> Completion:
    """The end of a request that generated nothing: cancelled by `close`, or failed with the
    engine."""
    return Completion(
        token_ids=(),
        text="",
        finish_reason="cancelled" if error is None else "error",
        error=error,
        prompt_tokens=len(handle.prompt_ids),
        timings=Timings(queued_s=time.monotonic() - handle.submitted_at),
        numerics_digest=numerics_digest,
    )
