"""One request measured: its timings, and what the engine's counters did in each phase of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from qwisp.bench.prompts import BenchPrompt
from qwisp.bench.report import PhaseCounters, RequestResult, Trial
from qwisp.engine.engine import Engine
from qwisp.types import Completion, Request


@dataclass(frozen=True)
class MeasuredRequest:
    """A completion, and what goes into the report about it."""

    completion: Completion
    result: RequestResult


def measure_request(engine: Engine, prompt: BenchPrompt, max_tokens: int) -> MeasuredRequest:
    """Generate greedily on an engine that does nothing else.

    Raises:
        QwispError: the request cannot be served, or failed.
    """
    before = prefilled = engine.stats()

    def on_prefill(done: int, total: int) -> None:
        # Called on the engine's thread after a chunk, so its last call parts prefill from decode
        # exactly; the thread that reads tokens sees each of them when the next is already at work.
        nonlocal prefilled
        prefilled = engine.stats()

    request = Request(prompt.content, max_tokens, on_prefill=on_prefill)
    completion = engine.submit(request).result()
    after = engine.stats()
    if completion.error is not None:
        raise completion.error
    timings = completion.timings
    return MeasuredRequest(
        completion,
        RequestResult(
            prompt=prompt.name,
            prompt_tokens=completion.prompt_tokens,
            generated_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            prefill_s=timings.prefill_s,
            first_token_s=timings.first_token_s,
            decode_s=timings.decode_s,
            prefill=PhaseCounters.between(before, prefilled),
            decode=PhaseCounters.between(prefilled, after),
        ),
    )


def sum_up(requests: Sequence[RequestResult]) -> Trial:
    """A trial's figures from those of its requests."""
    prefill = PhaseCounters.total([each.prefill for each in requests])
    decode = PhaseCounters.total([each.decode for each in requests])
    num_steps = sum(each.generated_tokens for each in requests)
    # From the first token to the last there is one step fewer than tokens.
    timed_steps = sum(each.generated_tokens - 1 for each in requests)
    decode_s = sum(each.decode_s for each in requests)
    all_steps_s = sum(each.first_token_s - each.prefill_s + each.decode_s for each in requests)
    asked = decode.expert_hits + decode.expert_misses
    return Trial(
        requests=tuple(requests),
        decode_tok_s=timed_steps / decode_s if timed_steps else None,
        first_token_s=fmean(each.first_token_s for each in requests),
        bytes_per_token=decode.bytes_read / num_steps,
        hit_rate=decode.expert_hits / asked,
        prefill_passes=prefill.passes / prefill.layer_steps if prefill.layer_steps else None,
        decode_passes=decode.passes / decode.layer_steps,
        read_wait_share=decode.read_wait_s / all_steps_s,
    )
