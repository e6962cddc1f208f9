"""The engine's thread: loads the model, serves one request after another, frees the model."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from qwisp.config import EngineConfig
from qwisp.engine.generation import Counters, Generation
from qwisp.engine.handle import Handle
from qwisp.engine.loading import LoadedModel, load_model
from qwisp.engine.waiting_line import WaitingLine
from qwisp.errors import DeviceError, EngineClosed, InvariantError, QwispError
from qwisp.types import Completion, EngineStats, Timings

logger = logging.getLogger(__name__)


class Worker:
    """Everything that touches MLX happens on this object's thread; its methods may be called from
    any.

    Invariant L5: every handle that joined the line ends, also when a fault of ours ends the thread.
    """

    def __init__(
        self,
        model: str | Path | None,
        config: EngineConfig,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        """Start the thread and wait for the model.

        Raises:
            QwispError: the load failed; nothing is left behind.
        """
        self.line = WaitingLine()
        self._config = config
        self._counters = Counters()
        self._loaded: LoadedModel | None = None
        self._serving: Handle | None = None
        self._final_stats: EngineStats | None = None
        self._load_error: BaseException | None = None
        self._ready = threading.Event()
        # A daemon: a process that forgets to close its engine still exits, through `Engine`'s exit
        # hook.
        self._thread = threading.Thread(
            target=self._main, args=(model, on_progress), name="qwisp-engine", daemon=True
        )
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            # Interrupted: the thread frees what it loaded as soon as it finds the line closed.
            self.line.close()
            raise
        if self._load_error is not None:
            self._thread.join()
            raise self._load_error

    @property
    def loaded(self) -> LoadedModel:
        """The model.

        Raises:
            EngineClosed: it was freed.
        """
        loaded = self._loaded
        if loaded is None:
            raise EngineClosed("the engine is closed and takes no more requests")
        return loaded

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on this thread, where waiting for a request would wait for
        ever."""
        return threading.current_thread() is self._thread

    def stats(self) -> EngineStats:
        """Counters since load; after the end, as they stood then."""
        loaded = self._loaded
        if loaded is None:
            assert self._final_stats is not None
            return self._final_stats
        return self._stats(loaded)

    def close(self) -> None:
        """End every request as cancelled, free the model, and wait for that. May be called
        again."""
        self.line.close()
        if not self.is_current_thread:
            self._thread.join()

    def _main(
        self, model: str | Path | None, on_progress: Callable[[int, int], None] | None
    ) -> None:
        try:
            self._loaded = load_model(model, self._config, on_progress)
        except BaseException as error:
            self._load_error = error
            return
        finally:
            self._ready.set()
        try:
            self._serve(self._loaded)
        except BaseException as fault:
            self._shut_down(self._loaded, fault)
            raise
        self._shut_down(self._loaded, None)

    def _serve(self, loaded: LoadedModel) -> None:
        """Serve one request after another until the line is closed."""
        while (handle := self.line.take()) is not None:
            self._serving = handle
            generation = Generation(
                handle,
                loaded.model,
                loaded.tokenizer,
                self._counters,
                lookahead=loaded.arena.is_resident,
                record_logits=self._config.record_logits,
            )
            while not _advance(generation):
                if self.line.is_closed:
                    handle.cancel()
                for waiting in self.line.remove_ended(time.monotonic()):
                    waiting.finish(_unserved(waiting, loaded.plan.numerics_digest, None))
            self._serving = None

    def _shut_down(self, loaded: LoadedModel, fault: BaseException | None) -> None:
        """End every open request, close the files, and let go of the model's memory."""
        self.line.close()
        error = None
        if fault is not None:
            error = EngineClosed(f"the engine stopped on a fault of its own: {fault!r}")
            error.__cause__ = fault
        waiting = self.line.drain()
        if self._serving is not None:
            waiting.insert(0, self._serving)
        for handle in waiting:
            handle.finish(_unserved(handle, loaded.plan.numerics_digest, error))
        self._final_stats = self._stats(loaded)
        self._loaded = None
        loaded.arena.close()

    def _stats(self, loaded: LoadedModel) -> EngineStats:
        arena, counters = loaded.arena.stats(), self._counters
        waits = (arena.compute_wait_s, loaded.model.compute_wait_s, counters.compute_wait_s)
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
            compute_wait_s=sum(waits),
            tokens_decoded=counters.tokens_decoded,
            tokens_prefilled=counters.tokens_prefilled,
            kv_bytes_reserved=counters.kv_bytes_reserved,
            peak_memory_bytes=mx.get_peak_memory(),
            layers=arena.layers,
        )


def _advance(generation: Generation) -> bool:
    """Advance a request by one layer of prefill or one token; True when it has ended.

    A fault of the request ends the request. A broken invariant is no such fault: nothing computed
    after it could be trusted, so it ends the engine.
    """
    try:
        return generation.advance()
    except InvariantError:
        raise
    except QwispError as error:
        generation.fail(error)
    except RuntimeError as fault:
        # MLX reports what the device refuses this way, above all an allocation that is too large.
        failure = DeviceError(f"the device failed: {fault}; a lower capacity leaves it more memory")
        failure.__cause__ = fault
        generation.fail(failure)
    return True


def _unserved(handle: Handle, numerics_digest: str, error: EngineClosed | None) -> Completion:
    """The end of a request that generated nothing: given up in the line, or failed with the
    engine."""
    now = time.monotonic()
    reason = "error" if error is not None else handle.reason_to_end(now) or "cancelled"
    return Completion(
        token_ids=(),
        text="",
        finish_reason=reason,
        error=error,
        prompt_tokens=len(handle.prompt_ids),
        timings=Timings(queued_s=now - handle.submitted_at),
        numerics_digest=numerics_digest,
    )
