"""The public engine: what a request gives back, and what is refused."""

import asyncio
import threading
from pathlib import Path

import mlx.core as mx
import pytest

import qwisp
from qwisp import Engine, EngineConfig, Request, SamplingParams
from qwisp.errors import (
    ConfigError,
    RequestError,
)
from tests.synthetic import make_checkpoint

PROMPT = [17, 4, 99, 250, 3]


def test_stream_generate_submit_and_run_give_the_same_tokens(engine: Engine) -> None:
    whole = engine.generate(PROMPT, max_tokens=12)
    events = list(engine.stream(PROMPT, max_tokens=12))
    assert tuple(event.token_id for event in events) == whole.token_ids
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == whole.finish_reason
    assert engine.submit(Request(PROMPT, max_tokens=12)).result().token_ids == whole.token_ids
    runs = engine.run([Request(PROMPT, max_tokens=n) for n in (3, 12)])
    assert [run.token_ids for run in runs] == [whole.token_ids[:3], whole.token_ids]
    assert whole.numerics_digest == engine.plan.numerics_digest
    assert len(set(whole.logits_digests)) > 1
    assert whole.logits_digests == runs[1].logits_digests


def test_finish_reason_tells_length_from_stop(engine: Engine) -> None:
    completion = engine.generate(PROMPT, max_tokens=2)
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 2)


def test_text_of_a_stream_joined_is_the_completion_text(embedded: Engine) -> None:
    prompt = "def add(a, b):\n    "
    whole = embedded.generate(prompt, max_tokens=40)
    assert len(whole.text) > 10
    joined = "".join(event.text for event in embedded.stream(prompt, max_tokens=40))
    assert joined == whole.text


def test_stop_string_ends_the_text_before_it_even_across_tokens(embedded: Engine) -> None:
    prompt = "def add(a, b):\n    "
    whole = embedded.generate(prompt, max_tokens=40)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 7]
    cut = embedded.generate(prompt, max_tokens=40, stop=(stop,))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids


def test_chat_messages_go_through_the_template_and_end_at_end_of_turn(embedded: Engine) -> None:
    messages = [{"role": "user", "content": "Hello, who are you?"}]
    completion = embedded.generate(messages, max_tokens=200)
    assert completion.prompt_tokens > 8
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] in (0, 2)
    assert "<|im_end|>" not in completion.text


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(engine: Engine) -> None:
    def sample(seed: int) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=1.5, top_p=0.95, seed=seed)
        return engine.generate(PROMPT, max_tokens=12, sampling=sampling).token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_prompt_and_generation_beyond_the_context_are_refused_with_the_numbers(
    engine: Engine,
) -> None:
    limit = engine.plan.max_context_tokens
    with pytest.raises(RequestError, match=f"{limit + 5} together; this engine holds {limit}"):
        engine.submit(Request(PROMPT, max_tokens=limit))


def test_stop_strings_without_a_tokenizer_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.submit(Request(PROMPT, stop=("x",)))
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.submit(Request("text"))


def test_run_starts_nothing_when_one_request_cannot_be_served(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.run([Request(PROMPT, max_tokens=4), Request([9999])])


def test_streamed_equals_resident_in_bf16(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bf16", seed=5, dtype="bfloat16", mixed_bits=True)
    outcomes = []
    for capacity in (8, 16):
        with Engine.load(folder, EngineConfig(capacity=capacity, record_logits=True)) as engine:
            completion = engine.generate(PROMPT * 8, max_tokens=6)
            outcomes.append((completion.token_ids, completion.logits_digests))
    assert outcomes[0] == outcomes[1]


def test_peak_memory_of_a_long_prefill_stays_within_the_plan(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", seed=5)
    before = mx.get_active_memory()
    with Engine.load(folder, EngineConfig(capacity=8)) as engine:
        engine.generate(list(range(500)) * 3, max_tokens=2)
        assert engine.stats().peak_memory_bytes - before <= engine.plan.total_bytes


def test_submit_works_from_many_threads_and_under_asyncio(engine: Engine) -> None:
    expected = engine.generate(PROMPT, max_tokens=4).token_ids
    results: list[tuple[int, ...]] = []

    def work() -> None:
        results.append(engine.generate(PROMPT, max_tokens=4).token_ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def gather() -> list[qwisp.Completion]:
        handle = engine.submit(Request(PROMPT, max_tokens=4))
        return await asyncio.gather(
            asyncio.to_thread(handle.result), asyncio.to_thread(handle.result)
        )

    results += [completion.token_ids for completion in asyncio.run(gather())]
    assert results == [expected] * 6


def test_load_reports_progress_up_to_the_whole(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Engine.load(folder, on_progress=lambda *a: seen.append(a)) as engine:
        plan = engine.plan
    totals = {total for _, total in seen}
    assert totals == {plan.resident_bytes + plan.arena_bytes}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="capactiy is not a setting of EngineConfig"):
        EngineConfig(capactiy=8)
    with pytest.raises(ConfigError, match="temperature=-1"):
        SamplingParams(temperature=-1.0)
    with pytest.raises(ConfigError, match="kv_budget_bytes=9 is above memory_budget_bytes=5"):
        EngineConfig(memory_budget_bytes=5, kv_budget_bytes=9)
