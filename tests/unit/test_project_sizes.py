"""Files and functions stay small, and what the house style bans stays out."""

import ast
import re
import textwrap
import tokenize

import pytest

from tests.tree import ROOT, functions, parse, python_files, relative

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_PACKAGE_CODE_LINES = 6000
"""Without blank lines, comments and docstrings, which nobody should save on."""

LONG_FILES: set[str] = set()
"""Files allowed above MAX_FILE_LINES, by path. Each needs a comment."""
LONG_FUNCTIONS: set[str] = set()
"""Functions allowed above MAX_FUNCTION_LINES, as `path::name`. Each needs a comment."""

BROAD_HANDLERS = {
    # Carries a fault of ours from a reader's thread to the one that waits, which raises it.
    "qwisp/arena/reader.py::_QueuedRead.run",
    # Carries whatever stopped the load from the engine's thread to the caller's, which raises it.
    "qwisp/engine/worker.py::Worker._main",
    # Runs a caller's function: whatever it raises ends that caller's request, under a name.
    "qwisp/engine/generation.py::_call",
    # A chat template is code of the model's folder: whatever it raises refuses the request.
    "qwisp/engine/tokenizer.py::Tokenizer._render",
    # The tokenizers library raises plain Exception for a bad file.
    "qwisp/engine/tokenizer_files.py::read_pretrained",
}
"""Functions that may catch everything, as `path::name`. Each needs a comment."""

CODE_TOKENS = {tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING}

TIERS = ("unit", "sim", "exact", "device")

PACKAGE = python_files("qwisp")
PYTHON = python_files("qwisp", "tests", "benchmarks")


def num_lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_long():
    long = {relative(path) for path in PYTHON if num_lines(path) > MAX_FILE_LINES}
    assert long == LONG_FILES


def test_no_function_is_long():
    long = {
        f"{relative(path)}::{name}"
        for path in PYTHON
        for name, node in functions(parse(path))
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long == LONG_FUNCTIONS


def test_the_package_stays_within_its_budget():
    assert sum(len(code_lines(path)) for path in PACKAGE) <= MAX_PACKAGE_CODE_LINES


def code_lines(path):
    """Numbers of the lines that hold code."""
    prose = {
        line
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type in CODE_TOKENS]
    return {line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - prose


def test_prose_is_not_counted_as_code(tmp_path):
    source = tmp_path / "x.py"
    source.write_text(
        '"""A.\n\nB.\n"""\n\n# C.\nx = f(\n    1,  # D.\n)\n"""E."""\ny = """\n1"""\n'
    )
    assert code_lines(source) == {7, 8, 9, 11, 12}


def catches_too_much(tree: ast.Module) -> list[str]:
    """Functions with a handler that would hide a fault of ours.

    `except BaseException` is the honest form of clean-up, and only with a bare `raise` at its end.
    """
    handlers = {
        node: name  # Inner functions come after those around them, so the innermost name stays.
        for name, function in [("module", tree), *functions(tree)]
        for node in ast.walk(function)
        if isinstance(node, ast.ExceptHandler)
    }
    return sorted({name for node, name in handlers.items() if is_too_broad(node)})


def is_too_broad(handler: ast.ExceptHandler) -> bool:
    caught = {node.id for node in ast.walk(handler.type or handler) if isinstance(node, ast.Name)}
    reraises = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
    hides = "BaseException" in caught and not reraises
    return handler.type is None or "Exception" in caught or hides


def test_no_handler_catches_everything():
    found = {
        f"{relative(path)}::{name}" for path in PACKAGE for name in catches_too_much(parse(path))
    }
    assert found == BROAD_HANDLERS


@pytest.mark.parametrize(
    ("caught", "then", "is_too_much"),
    [
        ("except Exception:", "raise", True),
        ("except (OSError, Exception) as e:", "raise", True),
        ("except:", "raise", True),
        ("except BaseException:", "pass", True),
        ("except BaseException:", "raise", False),
        ("except OSError:", "pass", False),
    ],
)
def test_a_handler_that_catches_everything_is_found(caught, then, is_too_much):
    statement = f"try: f()\n{caught} {then}\n"
    assert bool(catches_too_much(ast.parse(statement))) is is_too_much
    inside = ast.parse("class C:\n def f(self):\n" + textwrap.indent(statement, "  "))
    assert catches_too_much(inside) == ["C.f"] * is_too_much


def test_no_unfinished_work_is_marked():
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    texts = [*PYTHON, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / ".ci" / "run"]
    assert [relative(path) for path in texts if marks.search(path.read_text("utf-8"))] == []


def test_no_file_postpones_its_annotations():
    banned = "from __future__ import " + "annotations"
    assert [relative(path) for path in PYTHON if banned in path.read_text("utf-8")] == []


def test_every_test_file_is_in_a_tier():
    tiers = {f"tests/{tier}" for tier in TIERS}
    stray = [
        relative(path)
        for path in python_files("tests")
        if path.name.startswith("test_") and relative(path.parent) not in tiers
    ]
    assert stray == []


def test_the_device_tier_is_the_one_that_is_marked():
    marked = {
        relative(path)
        for path in python_files("tests")
        if re.search(r"^pytestmark = \[?\s*pytest\.mark\.device\b", path.read_text("utf-8"), re.M)
    }
    tests = {relative(path) for path in (ROOT / "tests" / "device").glob("test_*.py")}
    assert marked == tests


def test_no_test_is_skipped_without_a_reason():
    bare = re.compile(r"pytest\.mark\.(skip|xfail)\b(?!\()|pytest\.(skip|xfail)\(\)")
    assert [relative(p) for p in python_files("tests") if bare.search(p.read_text("utf-8"))] == []
