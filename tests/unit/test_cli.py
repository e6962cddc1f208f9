"""`python -m qwisp`, and the settings that command lines take from the environment."""

import gc
import io
import json
import os
import signal
import subprocess
import sys

import mlx.core as mx
import pytest

import qwisp
from qwisp.__main__ import build_parser, main, parse_bytes
from qwisp.config import EngineConfig, SamplingParams
from qwisp.errors import ConfigError
from qwisp.types import Request
from tests.tree import ROOT

MESSAGE = ({"role": "user", "content": "What is a queue?"},)


@pytest.fixture(scope="module")
def engine():
    with qwisp.Engine.load(config=EngineConfig(capacity=16)) as engine:
        yield engine


@pytest.fixture
def spawn():
    """Starts `python -m qwisp` on pipes; what is left of it ends with the test."""
    started = []

    def start(*args):
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "qwisp", *map(str, args)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_defaults_are_those_of_the_settings():
    args = build_parser().parse_args(["generate", "x"])
    for name in SamplingParams.model_fields:
        assert getattr(args, name) == getattr(SamplingParams(), name), name
    assert args.max_tokens == Request("x").max_tokens
    assert args.capacity == EngineConfig().capacity
    assert args.memory_budget == EngineConfig().memory_budget_bytes
    assert args.raw is False


def test_the_environment_gives_the_defaults_and_options_win(monkeypatch, capsys):
    monkeypatch.setenv("QWISP_CAPACITY", "24")
    assert main(["plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"] == 24
    assert main(["plan", "--json", "--capacity", "32"]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"] == 32


def test_settings_come_from_the_environment():
    environ = {
        "QWISP_CAPACITY": "12",
        "QWISP_MEMORY_BUDGET_BYTES": "8000000000",
        "QWISP_IO_THREADS": "2",
        "QWISP_READ_GBS_LIMIT": "1.5",
        "HOME": "/root",
    }
    assert EngineConfig.from_env(environ) == EngineConfig(
        capacity=12, memory_budget_bytes=8_000_000_000, io_threads=2, read_gbs_limit=1.5
    )
    assert EngineConfig.from_env({"QWISP_CAPACITY": "auto"}) == EngineConfig()
    assert EngineConfig.from_env({"QWISP_CAPACITY": " "}) == EngineConfig()
    assert EngineConfig.from_env({"QWISP_READ_GBS_LIMIT": "2"}) == EngineConfig(read_gbs_limit=2.0)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("QWISP_CAPACITY", "most"),
        ("QWISP_CAPACITY", "8.5"),
        ("QWISP_CAPACITY", "0"),
        ("QWISP_MEMORY_BUDGET_BYTES", "8GB"),
        ("QWISP_IO_THREADS", "-1"),
        ("QWISP_READ_GBS_LIMIT", "fast"),
        ("QWISP_READ_GBS_LIMIT", "inf"),
    ],
)
def test_a_bad_environment_variable_is_named(variable, text):
    with pytest.raises(ConfigError, match=f"environment variable {variable}: "):
        EngineConfig.from_env({variable: text})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("auto", "auto"),
        ("123456", 123456),
        ("8GB", 8 * 10**9),
        ("7.5GiB", 15 << 29),
        ("900 mb", 900 * 10**6),
        ("64KiB", 1 << 16),
    ],
)
def test_a_size_has_a_unit_or_is_in_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "8G", "8 GB RAM", "GB", "1e9", "nan"])
def test_a_word_that_is_no_size_is_refused(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args(["plan", f"--memory-budget={text}"])
    assert stopped.value.code == 2
    assert "such as 8GB" in capsys.readouterr().err


def test_a_plan_is_that_of_the_engine_and_loads_no_weights(engine, capsys):
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert main(["plan", "--capacity", "16", "--json"]) == 0
    assert mx.get_peak_memory() < before + 100_000
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("total_bytes") == engine.plan.total_bytes
    assert printed == vars(engine.plan)


def test_a_plan_for_people_has_a_line_for_each_fact(engine, capsys):
    assert main(["plan", "--capacity", "16"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(facts) == {*vars(engine.plan), "total_bytes"}
    assert facts["capacity"] == "16"
    assert facts["arena_bytes"] == f"{engine.plan.arena_bytes}  (7.5 MiB)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--capacity", "6"], "set capacity to 8 or more"),
        (["generate", "x", "--capacity", "6"], "set capacity to 8 or more"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "", "--raw"], "no tokens"),
        (["plan", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_a_bad_setting_says_what_works_and_is_no_traceback(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out.strip() == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("qwisp: ")
    assert words in last


@pytest.mark.parametrize(
    ("arguments", "prompt", "options"),
    [
        (["What is a queue?"], MESSAGE, {}),
        (["What is a queue?", "--chat", "--stop", "piece"], MESSAGE, {"stop": ("piece",)}),
        (["def f(x):\n", "--raw"], "def f(x):\n", {}),
        (
            [*("def f(x):\n", "--raw", "--temperature", "0.9"), *("--top-p", "0.9", "--seed", "3")],
            "def f(x):\n",
            {"sampling": SamplingParams(temperature=0.9, top_p=0.9, seed=3)},
        ),
    ],
)
def test_streamed_text_is_the_text_of_the_completion(engine, arguments, prompt, options, capsys):
    assert main(["generate", *arguments, "--capacity", "16", "--max-tokens", "12"]) == 0
    captured = capsys.readouterr()
    completion = engine.generate(prompt, max_tokens=12, **options)
    assert captured.out == completion.text + "\n"
    assert str(engine.plan) in captured.err
    summary = captured.err.splitlines()[-1]
    assert summary.startswith(f"{len(completion.token_ids)} tokens ({completion.finish_reason})")
    for words in ("tok/s", "first token after", "MB read per token", "% expert hits"):
        assert words in summary


def test_a_dash_reads_the_prompt_from_stdin(engine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
    assert main(["generate", "-", "--raw", "--capacity", "16", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == engine.generate("def f(x):\n", max_tokens=3).text + "\n"


def test_text_comes_while_more_is_generated_and_an_interrupt_ends_it_cleanly(spawn):
    process = spawn("generate", "def f(x):\n", "--raw", "--max-tokens", 3000)
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert len(first) == 1
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert len(rest) < 3000


def test_a_reader_that_goes_away_is_no_traceback(spawn):
    process = spawn("generate", "def f(x):\n", "--raw", "--max-tokens", 3000)
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 141, errors
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors
