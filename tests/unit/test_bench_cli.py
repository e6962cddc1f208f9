"""`python -m qwisp.bench` as a reader runs it."""

import json
import os
import subprocess
import sys

import pytest

from qwisp.bench.__main__ import build_parser, main
from qwisp.bench.machine import describe_machine, describe_source, describe_versions
from qwisp.bench.prompts import BUILT_IN, read_prompts
from qwisp.bench.report import Report
from qwisp.bench.settings import RunSettings
from qwisp.config import EngineConfig
from qwisp.errors import ConfigError
from tests.tree import ROOT


def bench(*args, flags=()):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QWISP_")}
    return subprocess.run(
        [sys.executable, *flags, "-m", "qwisp.bench", *map(str, args)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_ends_with_one_line_of_json(tmp_path):
    (tmp_path / "prompt.txt").write_text("def f(x):\n")
    done = bench(
        *("--capacity", 8, "--max-tokens", 2, "--trials", 1),
        *("--prompt-file", tmp_path / "prompt.txt", "--out", tmp_path / "new" / "folder"),
    )
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    report = Report.model_validate_json(last)
    assert report.is_exact
    assert report.reference.plan.capacity == 64
    assert [result.plan.capacity for result in report.results] == [8]
    assert report.reference.prompts[0].prompt == "prompt"
    assert report.config == EngineConfig()
    assert any(line.split()[-1:] == ["yes"] for line in table)
    assert json.loads((tmp_path / "new" / "folder" / "bench.json").read_text()) == json.loads(last)
    assert "C=8 trial 1 of 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_says_where_and_with_what_it_was_measured():
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    source = describe_source()
    assert (source.commit if source else "") == head.stdout.strip()
    versions = describe_versions()
    assert versions.python == sys.version.split()[0]
    machine = describe_machine("cpu")
    assert machine.cpu_count == os.cpu_count()
    assert machine.memory_bytes > 1 << 28


def test_optimised_python_is_refused():
    done = bench("--max-tokens", 1, flags=["-O"])
    assert done.returncode == 2
    assert done.stdout == ""
    assert "run it without -O" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--capacity", "6"], "set capacity to 8 or more"),
        (["run", "--capacity", "8,65"], "set capacity to 64 or less"),
        (["--trials", "0"], "trials=0 is below 1"),
        (["--max-tokens", "0"], "max_tokens=0 is below 1"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--prompt-file", "/nowhere.txt"], "/nowhere.txt"),
        (["--read-gbs-limit", "0"], "read_gbs_limit=0.0"),
        (["--out", "/dev/null/folder"], "/dev/null/folder"),
    ],
)
def test_a_bad_setting_is_one_line_that_says_what_works(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.startswith("qwisp.bench: ")
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("text", ["six", "0", "-8", "8,", "8;16", "1.5", "²"])
def test_a_word_that_is_no_capacity_is_refused(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args(["run", f"--capacity={text}"])
    assert stopped.value.code == 2
    assert "give whole numbers above 0, or 'auto'" in capsys.readouterr().err


def test_capacities_add_up_over_commas_and_options():
    args = build_parser().parse_args(["run", "--capacity", "8, 16", "--capacity", "auto"])
    assert args.capacity == [[8, 16], ["auto"]]


def test_defaults_are_those_of_the_settings():
    args = build_parser().parse_args(["run"])
    settings = RunSettings()
    assert (args.max_tokens, args.trials, args.model) == (
        settings.max_tokens,
        settings.trials,
        settings.model,
    )
    assert args.read_gbs_limit == EngineConfig().read_gbs_limit
    assert build_parser(EngineConfig(read_gbs_limit=2.5)).parse_args(["run"]).read_gbs_limit == 2.5


def test_a_bad_environment_variable_is_named(monkeypatch, capsys):
    monkeypatch.setenv("QWISP_IO_THREADS", "many")
    assert main([]) == 2
    assert "QWISP_IO_THREADS" in capsys.readouterr().err


def test_built_in_prompts_have_names_of_their_own():
    assert len({prompt.name for prompt in BUILT_IN}) == len(BUILT_IN) == 3


def test_a_prompt_file_is_one_prompt_and_jsonl_has_one_per_line(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one\n\n---\ntwo")
    assert [prompt.content for prompt in read_prompts(text)] == ["one\n\n---\ntwo"]
    lines = tmp_path / "b.jsonl"
    lines.write_text('"one"\n\n[{"role": "user", "content": "two"}]\n[1, 2]\n')
    prompts = read_prompts(lines)
    assert [prompt.name for prompt in prompts] == ["b:1", "b:3", "b:4"]
    assert [prompt.content for prompt in prompts] == [
        "one",
        [{"role": "user", "content": "two"}],
        [1, 2],
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b" \n", "is empty"),
        (b'"one"\n{"a": 1}\n', "line 2"),
        (b'"one"\nnot json\n', "line 2"),
        (b'""\n', "line 1"),
        (b"\xff\xfe", "bad.jsonl"),
    ],
)
def test_a_bad_prompt_file_is_named(content, words, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_prompts(path)
