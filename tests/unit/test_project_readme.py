"""README.md is true: its commands and its quickstart run, its links lead somewhere."""

import ast
import re
import subprocess
import sys

import pytest

from tests.tree import ROOT, relative

README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def block(name: str) -> str:
    """The fenced block under `<!-- command: name -->`."""
    (text,) = re.findall(rf"^<!-- command: {name} -->\n```\w+\n(.*?)^```$", README, re.M | re.S)
    return text


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize(("name", "last"), [("bench", "-m qwisp.bench"), ("tests", "-m pytest")])
def test_a_command_sets_up_and_runs_on_a_bare_machine(name, last):
    lines = [line.strip() for line in block(name).splitlines()]
    assert lines[0] == "python3 -m venv .venv &&"
    assert re.fullmatch(r"\.venv/bin/python -m pip install --quiet --editable \S+ &&", lines[1])
    assert lines[2:] == [f".venv/bin/python {last}"]


def test_ci_runs_the_test_command_of_the_readme():
    """Its own extraction gives the block, and it has no other test command."""
    (program,) = re.findall(r"^awk '(.*?)' README\.md", CI, re.M | re.S)
    extracted = subprocess.run(
        ["awk", program, ROOT / "README.md"], capture_output=True, text=True, check=True
    ).stdout
    assert extracted == block("tests")
    assert "pytest" not in CI


def test_the_quickstart_runs_as_written():
    code = block("quickstart")
    assert len(code.splitlines()) <= 8
    ast.parse(code)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"^\d+ MB of experts read$", run.stdout, re.M), run.stdout
    assert "16 of 64 experts" in run.stdout


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_to_files(path):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_named_files_exist(path):
    """A path in code quotes, from the root of the repository, names something that is there."""
    named = re.findall(r"`((?:qwisp|tests|docs|benchmarks)/[\w./-]+)(?:::\w+)?`", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_named_tests_exist(path):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text(encoding="utf-8"))
    absent = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert absent == []


def test_every_invariant_of_the_design_is_accounted_for():
    rows = re.compile(r"^\| ([A-Z]\d) \|", re.M)
    design = rows.findall((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))
    accounted = rows.findall((ROOT / "docs" / "invariants.md").read_text(encoding="utf-8"))
    assert len(design) > 0
    assert accounted == design
