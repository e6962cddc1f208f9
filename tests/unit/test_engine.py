"""The public engine: one request's life, from any thread, and every way it can end."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import qwisp
from qwisp import Engine, EngineConfig, Request, SamplingParams
from qwisp.engine.model import Model
from qwisp.errors import ConfigError, EngineClosed, ExpertReadError, RequestError
from tests.synthetic import make_checkpoint

PROMPT = [17, 4, 99, 250, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=21, vocab=512)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder, EngineConfig(capacity=8, record_logits=True)) as engine:
        yield engine


@pytest.fixture(scope="module")
def embedded() -> Iterator[Engine]:
    with Engine.load() as engine:
        yield engine


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
    with pytest.raises(RequestError, match="max_tokens=0"):
        engine.submit(Request(PROMPT, max_tokens=0))


def test_stop_strings_without_a_tokenizer_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.submit(Request(PROMPT, stop=("x",)))
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.submit(Request("text"))


def test_run_starts_nothing_when_one_request_cannot_be_served(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.run([Request(PROMPT, max_tokens=4), Request([9999])])


def test_cancel_ends_a_running_and_a_queued_request(engine: Engine) -> None:
    running = engine.submit(Request(PROMPT, max_tokens=2000))
    queued = engine.submit(Request(PROMPT, max_tokens=2000))
    next(iter(running))
    queued.cancel()
    running.cancel()
    completion = running.result(timeout=30)
    assert completion.finish_reason == "cancelled"
    assert 0 < len(completion.token_ids) < 2000
    assert queued.result(timeout=30).finish_reason == "cancelled"
    assert engine.generate(PROMPT, max_tokens=2).error is None


def test_leaving_a_stream_early_cancels_it(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_tokens=2000)
    next(stream)
    stream.close()
    started = time.monotonic()
    engine.generate(PROMPT, max_tokens=1)
    assert time.monotonic() - started < 20  # not 2,000 tokens later


def test_deadline_ends_a_request_with_what_it_has(engine: Engine) -> None:
    completion = engine.submit(Request(PROMPT, max_tokens=3000, deadline_s=0.5)).result(30)
    assert completion.finish_reason == "deadline"
    assert completion.error is None


def test_text_held_back_for_a_stop_string_is_released_when_the_deadline_comes(
    embedded: Engine,
) -> None:
    prompt = "import os\n\nclass Node:\n"
    whole = embedded.generate(prompt, max_tokens=500)
    # Everything generated is the beginning of this stop string, so all of it is held back.
    request = Request(prompt, max_tokens=500, stop=(whole.text + "!",), deadline_s=2.0)
    completion = embedded.submit(request).result(60)
    assert completion.finish_reason == "deadline"
    assert completion.text
    assert whole.text.startswith(completion.text)


def test_result_times_out_without_ending_the_request(engine: Engine) -> None:
    handle = engine.submit(Request(PROMPT, max_tokens=300))
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.001)
    handle.cancel()
    assert handle.result(timeout=30).error is None


def test_prefill_reports_progress_and_a_raising_callback_fails_its_request_alone(
    folder: Path,
) -> None:
    seen: list[tuple[int, int]] = []

    def explode(done: int, total: int) -> None:
        raise ZeroDivisionError("of the caller")

    with Engine.load(folder, EngineConfig(prefill_chunk=16)) as engine:
        good = Request(PROMPT * 10, max_tokens=2, on_prefill=lambda *a: seen.append(a))
        bad = Request(PROMPT * 10, max_tokens=2, on_prefill=explode)
        first, second, third = engine.run([good, bad, good])
    assert seen[:4] == [(16, 49), (32, 49), (48, 49), (49, 49)]
    assert isinstance(second.error, RequestError)
    assert "ZeroDivisionError: of the caller" in str(second.error)
    assert second.finish_reason == "error"
    assert first.token_ids == third.token_ids


def test_unreadable_expert_fails_only_the_request_that_needs_it(folder: Path, tmp_path) -> None:
    model = tmp_path / "copy"
    model.mkdir()
    for file in folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    shard = model / "model.safetensors"
    with Engine.load(model, EngineConfig(capacity=8)) as engine:
        expected = engine.generate(PROMPT, max_tokens=8)
        whole = shard.read_bytes()
        os.truncate(shard, 4096)
        failed = engine.submit(Request([5, 9, 200, 7, 31], max_tokens=8)).result()
        assert isinstance(failed.error, ExpertReadError)
        assert str(shard) in str(failed.error)
        with pytest.raises(ExpertReadError):
            engine.generate([5, 9, 200, 7, 31], max_tokens=8)
        engine.check()
        shard.write_bytes(whole)
        assert engine.generate(PROMPT, max_tokens=8).token_ids == expected.token_ids


def test_reservations_return_to_zero_after_every_kind_of_end(engine: Engine) -> None:
    engine.generate(PROMPT, max_tokens=3)
    handle = engine.submit(Request(PROMPT, max_tokens=2000))
    next(iter(handle))
    assert engine.stats().kv_bytes_reserved > 0
    handle.cancel()
    handle.result()
    assert engine.stats().kv_bytes_reserved == 0


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


def test_close_ends_every_handle_and_refuses_new_requests(folder: Path) -> None:
    engine = Engine.load(folder)
    handles = [engine.submit(Request(PROMPT, max_tokens=2000)) for _ in range(3)]
    engine.close()
    engine.close()
    reasons = {handle.result(timeout=10).finish_reason for handle in handles}
    assert reasons == {"cancelled"}
    assert list(handles[2]) == []
    with pytest.raises(EngineClosed):
        engine.submit(Request(PROMPT))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_itself_ends_every_request_with_the_cause(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("ours")

    with Engine.load(folder) as engine:
        monkeypatch.setattr(Model, "decode", broken)
        handles = [engine.submit(Request(PROMPT, max_tokens=3)) for _ in range(2)]
        for handle in handles:
            error = handle.result(timeout=10).error
            assert isinstance(error, EngineClosed)
            assert isinstance(error.__cause__, ZeroDivisionError)
        with pytest.raises(EngineClosed):
            engine.generate(PROMPT)


def test_a_failing_load_raises_in_the_caller_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(qwisp.CheckpointError):
        Engine.load(tmp_path)
    with pytest.raises(ConfigError, match="capacity=7"):
        Engine.load(None, EngineConfig(capacity=7))
    assert threading.active_count() == before


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
