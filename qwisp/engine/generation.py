"""One request at work: prefill layer by layer, then token by token, until a reason to end."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from qwisp.engine.handle import Handle
from qwisp.engine.model import DecodeStep, Model
from qwisp.engine.sampling import Sampler
from qwisp.engine.stop_strings import StopMatcher, StopText
from qwisp.engine.tokenizer import Tokenizer
from qwisp.errors import DeviceError, QwispError, RequestError
from qwisp.types import Completion, FinishReason, Timings, TokenEvent

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What generations have done since load. Written by the engine's thread, read by any."""

    tokens_decoded: int = 0
    tokens_prefilled: int = 0
    compute_wait_s: float = 0.0
    """Seconds spent waiting for tokens."""
    kv_bytes_reserved: int = 0


@dataclass(frozen=True, slots=True)
class _Launched:
    """A decode step on its way: the token is not known to the host yet."""

    step: DecodeStep
    token: mx.array
    peak_logit: mx.array


class Generation:
    """The life of one request on the engine's thread.

    `advance` does a bounded piece of work: one layer of a prefill, or one token. With every expert
    resident the next token's step is launched before the host has read the current one, so the
    device never waits for the host.
    """

    def __init__(
        self,
        handle: Handle,
        model: Model,
        tokenizer: Tokenizer,
        counters: Counters,
        *,
        lookahead: bool,
        record_logits: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.handle = handle
        self._model = model
        self._tokenizer = tokenizer
        self._counters = counters
        self._lookahead = lookahead
        self._record_logits = record_logits
        self._clock = clock
        self._started_at = clock()
        self._prefilled_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        prompt, request = handle.prompt_ids, handle.request
        # The last token generated is never fed back, hence one position less than tokens in all.
        self._state = model.new_lane(len(prompt) + request.max_tokens - 1)
        counters.kv_bytes_reserved += self._state.nbytes
        self._sampler = Sampler(request.sampling)
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopMatcher(request.stop)
        self._prefill: Iterator[object] | None = self._run_prefill(prompt[:-1])
        self._launched: _Launched | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._digests: list[str] = []

    def advance(self) -> bool:
        """Do the next piece of work; True when the request has ended and its handle knows.

        Raises:
            QwispError: the request cannot go on; the caller ends it with `fail`.
        """
        early = self.handle.reason_to_end(self._clock())
        if early is not None:
            self._end_early(early)
            return True
        if self._prefill is not None:
            if next(self._prefill, None) is None:
                self._prefill = None
                self._prefilled_at = self._clock()
            return False
        return self._next_token()

    def fail(self, error: QwispError) -> None:
        """End the request with an error."""
        self._end_early("error", error)

    def _run_prefill(self, token_ids: Sequence[int]) -> Iterator[object]:
        on_prefill = self.handle.request.on_prefill
        counted = 0
        for progress in self._model.prefill(token_ids, self._state):
            if progress.is_chunk_done:
                self._counters.tokens_prefilled += progress.tokens_done - counted
                counted = progress.tokens_done
            if on_prefill is not None:
                _call(on_prefill, progress.tokens_done, len(token_ids))
            yield progress

    def _next_token(self) -> bool:
        launched = self._launched or self._launch(mx.array(self._last_token(), dtype=mx.uint32))
        self._launched = None
        is_last = len(self._token_ids) + 1 == self.handle.request.max_tokens
        if self._lookahead and not is_last:
            self._launched = self._launch(launched.token)
        token_id = self._read(launched)
        self._model.observe(launched.step)
        return self._accept(token_id, is_last=is_last)

    def _last_token(self) -> int:
        return self._token_ids[-1] if self._token_ids else self.handle.prompt_ids[-1]

    def _launch(self, token: mx.array) -> _Launched:
        step = self._model.decode(token.reshape(1), [self._state])
        row = step.logits[0]
        launched = _Launched(step, self._sampler.next(row), mx.max(row))
        mx.async_eval(launched.token, launched.peak_logit, row, [ids for _, ids in step.routes])
        return launched

    def _read(self, launched: _Launched) -> int:
        started = self._clock()
        token_id = cast(int, launched.token.item())
        peak = cast(float, launched.peak_logit.item())
        self._counters.compute_wait_s += self._clock() - started
        if not float("-inf") < peak < float("inf"):
            raise DeviceError(
                f"the largest logit of token {len(self._token_ids)} is {peak}, not finite: "
                "the weights are damaged or the device failed; try another copy of the model"
            )
        if self._record_logits:
            row: Any = launched.step.logits[0]
            self._digests.append(hashlib.sha256(memoryview(row)).hexdigest())
        return token_id

    def _accept(self, token_id: int, *, is_last: bool) -> bool:
        """Add a token to the result and deliver it; True when it was the last one."""
        now = self._clock()
        self._first_token_at = self._first_token_at or now
        self._last_token_at = now
        self._token_ids.append(token_id)
        self._counters.tokens_decoded += 1
        is_eos = token_id in self._tokenizer.eos_token_ids
        match = self._stop.add("" if is_eos else self._detokenizer.add(token_id))
        text, is_stopped = match.text, match.is_stopped or is_eos
        if is_last or is_stopped:
            rest = self._release_text()
            text, is_stopped = text + rest.text, is_stopped or rest.is_stopped
        reason: FinishReason | None = "stop" if is_stopped else "length" if is_last else None
        self._text.append(text)
        self.handle.emit(TokenEvent(token_id, text, reason))
        if reason is not None:
            self._finish(reason)
        return reason is not None

    def _end_early(self, reason: FinishReason, error: QwispError | None = None) -> None:
        self._text.append(self._release_text().text)
        self._finish(reason, error)

    def _release_text(self) -> StopText:
        """The text held back for a character or a stop string that no longer comes."""
        rest = self._stop.add(self._detokenizer.finish())
        return StopText(rest.text + self._stop.finish(), rest.is_stopped)

    def _finish(self, reason: FinishReason, error: QwispError | None = None) -> None:
        self._launched = None
        self._counters.kv_bytes_reserved -= self._state.nbytes
        self.handle.finish(
            Completion(
                token_ids=tuple(self._token_ids),
                text="".join(self._text),
                finish_reason=reason,
                error=error,
                prompt_tokens=len(self.handle.prompt_ids),
                timings=self._timings(),
                numerics_digest=self._model.numerics.digest,
                logits_digests=tuple(self._digests),
            )
        )
        logger.info(
            "request ended: %s, %d prompt tokens, %d generated, %.2f s in all",
            reason,
            len(self.handle.prompt_ids),
            len(self._token_ids),
            self._clock() - self.handle.submitted_at,
        )

    def _timings(self) -> Timings:
        started, now = self._started_at, self._clock()
        first = self._first_token_at
        return Timings(
            queued_s=started - self.handle.submitted_at,
            prefill_s=(self._prefilled_at or now) - started,
            first_token_s=0.0 if first is None else first - started,
            decode_s=0.0 if first is None else (self._last_token_at or first) - first,
        )


def _call(callback: Callable[[int, int], None], done: int, total: int) -> None:
    """Run a caller's callback on our thread: whatever it raises ends its own request and no
    other."""
    try:
        callback(done, total)
    except Exception as fault:
        raise RequestError(f"on_prefill raised {type(fault).__name__}: {fault}") from fault
