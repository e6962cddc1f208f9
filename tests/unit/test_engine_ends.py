"""Every way a request, an engine or a process can end, and who is hit by it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest

import qwisp
from qwisp import Engine, EngineConfig, Request
from qwisp.engine.handle import Handle
from qwisp.engine.model import Model
from qwisp.errors import (
    ConfigError,
    DeviceError,
    EngineClosed,
    ExpertReadError,
    InvariantError,
    RequestError,
)

PROMPT = [17, 4, 99, 250, 3]


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"sampling": None},
        {"deadline_s": "5"},
        {"deadline_s": 0},
        {"on_prefill": 3},
    ],
    ids=str,
)
def test_a_request_of_the_wrong_kind_is_refused_before_it_is_queued(bad: dict) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(bad))}="):
        Request(PROMPT, **bad)


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


@pytest.mark.parametrize("num_taken", [0, 1], ids=["before the first token", "after it"])
def test_leaving_a_stream_early_cancels_it(endless: Engine, num_taken: int) -> None:
    stream = endless.stream(PROMPT, max_tokens=3000)
    for _ in range(num_taken):
        next(stream)
    before = endless.stats().tokens_decoded
    del stream
    endless.generate(PROMPT, max_tokens=1)
    assert endless.stats().tokens_decoded - before < 1000


def test_an_interrupt_while_waiting_cancels_the_request(
    endless: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = []

    def interrupted(handle: Handle, timeout: float | None = None) -> None:
        handles.append(handle)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Handle, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            endless.generate(PROMPT, max_tokens=3000)
    assert handles[0].result(timeout=30).finish_reason == "cancelled"


def test_a_queued_request_ends_at_once_when_cancelled_or_late(endless: Engine) -> None:
    head = endless.submit(Request(PROMPT, max_tokens=3000))
    cancelled = endless.submit(Request(PROMPT, max_tokens=3000))
    late = endless.submit(Request(PROMPT, max_tokens=3000, deadline_s=0.01))
    cancelled.cancel()
    assert cancelled.result(timeout=30).finish_reason == "cancelled"
    assert late.result(timeout=30).finish_reason == "deadline"
    with pytest.raises(TimeoutError):
        head.result(timeout=0)
    head.cancel()
    head.result(timeout=30)


def test_a_callback_that_waits_for_another_request_is_refused(engine: Engine) -> None:
    def wait(done: int, total: int) -> None:
        engine.generate(PROMPT, max_tokens=1)

    (completion,) = engine.run([Request(PROMPT, max_tokens=1, on_prefill=wait)])
    assert "cannot wait for another request" in str(completion.error)


def test_what_the_device_refuses_ends_one_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, failures = Model.decode, [RuntimeError("[malloc] Unable to allocate 1 bytes.")]

    def sometimes(self: Model, *args: object) -> object:
        if failures:
            raise failures.pop()
        return decode(self, *args)

    monkeypatch.setattr(Model, "decode", sometimes)
    with Engine.load(folder) as engine:
        first, second = engine.run([Request(PROMPT, max_tokens=2)] * 2)
    assert isinstance(first.error, DeviceError)
    assert second.error is None


def test_a_broken_invariant_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise InvariantError("A1: planted")

    monkeypatch.setattr(Model, "decode", broken)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with Engine.load(folder) as engine:
        handle = engine.submit(Request(PROMPT, max_tokens=2))
        assert isinstance(handle.result(timeout=10).error, EngineClosed)


def test_close_frees_the_model_and_keeps_plan_and_counters() -> None:
    before = mx.get_active_memory()
    engine = Engine.load()
    engine.generate(PROMPT, max_tokens=3)
    held = engine.plan.resident_bytes + engine.plan.arena_bytes
    assert held > 30e6
    # Engines of other tests may let go of a lane meanwhile: 4 MB at most.
    assert mx.get_active_memory() - before > held - 4e6
    engine.close()
    assert mx.get_active_memory() - before < 4e6
    assert engine.stats().tokens_decoded == 3
    assert engine.plan.capacity == 64


def test_a_load_that_fails_late_closes_what_it_opened(folder: Path, tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(qwisp.TraceError):
            Engine.load(folder, EngineConfig(record_routes=tmp_path / "none" / "routes"))
    assert threading.active_count() == before


EXITS = """
import sys, qwisp
engine = qwisp.Engine.load(sys.argv[1], qwisp.EngineConfig(capacity=8))
handle = engine.submit(qwisp.Request([5, 6, 7], max_tokens=3000))
next(iter(handle))
{}
"""


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)])
def test_a_process_that_exits_while_a_request_runs_ends_cleanly(
    ending: str, status: int, folder: Path
) -> None:
    script = EXITS.format(ending)
    ended = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True)
    assert ended.returncode == status, ended.stderr
    assert b"terminate" not in ended.stderr


def test_a_cancelled_prefill_leaves_nothing_in_the_next_requests_counters(folder: Path) -> None:
    with Engine.load(folder) as engine:

        def cancel(done: int, total: int) -> None:
            handles[0].cancel()

        handles = [engine.submit(Request(PROMPT * 4, max_tokens=1, on_prefill=cancel))]
        assert handles[0].result(timeout=10).finish_reason == "cancelled"
        before = engine.stats().layer_steps
        engine.generate(PROMPT * 4, max_tokens=1)
        # One layer of the prefill, whose last layer needs no experts, and two of the decode step.
        assert engine.stats().layer_steps - before == 3


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
    # Two layers: the first of a chunk counts as half of it.
    expected = [8, 16, 24, 32, 40, 48, 48, 49]
    assert seen[:8] == [(done, 49) for done in expected]
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
