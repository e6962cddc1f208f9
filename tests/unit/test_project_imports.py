"""Dependencies go one way, and importing the package does nothing else."""

import ast
import subprocess
import sys

import pytest

from tests.tree import ROOT, module_name, parse, python_files, relative

RANK = {
    "errors": 0,
    "models": 0,
    "config": 1,
    "types": 2,
    "kernels": 3,
    "arena": 4,
    "lanes": 4,
    "engine": 5,
    "": 6,  # qwisp/__init__.py, the public names
    "cli": 7,
    "bench": 8,
    "__main__": 8,
}
"""A part imports itself and parts of lower rank. Parts of one rank are siblings and stay apart."""


def part_of(module: str) -> str:
    return [*module.split("."), ""][1]


def imported_modules(tree: ast.Module, package: str) -> set[str]:
    """What a file may load, wherever the import stands. `package` resolves relative names."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            # `from qwisp import engine` loads a part, `from qwisp import Engine` the public names.
            names.update(
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base
                for alias in node.names
            )
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            function = function.id if isinstance(function, ast.Name) else function
            if function in {"import_module", "__import__"}:
                names.add(str(node.args[0].value))
    return {name for name in names if name.split(".")[0] == "qwisp"}


FILES = {module_name(path): path for path in python_files("qwisp")}
MODULES = set(FILES) | {name.rpartition(".")[0] for name in FILES}


def upward_imports(module: str, tree: ast.Module, package: str) -> list[str]:
    part = part_of(module)
    return sorted(
        name
        for name in imported_modules(tree, package)
        if part_of(name) != part and RANK[part_of(name)] >= RANK[part]
    )


def test_every_part_has_a_rank():
    assert {part_of(module) for module in FILES} - set(RANK) == set()


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module):
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    assert upward_imports(module, parse(path), package) == []


@pytest.mark.parametrize(
    "source",
    [
        "import qwisp.engine.spec",
        "from qwisp.engine import spec",
        "from qwisp import engine",
        "import qwisp",
        "from qwisp import Engine",
        "from ..engine import spec",
        "from ..lanes.state import Lane",
        "from .. import lanes",
        "def f():\n    from qwisp.lanes import state",
        "if TYPE_CHECKING:\n    from qwisp.engine.spec import MoESpec",
        "importlib.import_module('qwisp.engine')",
    ],
)
def test_an_upward_import_is_found_in_every_form(source):
    tree = ast.parse(source)
    assert upward_imports("qwisp.arena.slots", tree, "qwisp.arena") != []


@pytest.mark.parametrize(
    "source",
    [
        "import qwisp.kernels.numerics",
        "from qwisp.arena.source import ExpertLayer",
        "from .source import ExpertLayer",
        "from qwisp import errors",
        "import os",
    ],
)
def test_a_downward_import_is_allowed(source):
    assert upward_imports("qwisp.arena.slots", ast.parse(source), "qwisp.arena") == []


def reads_environment(tree: ast.Module) -> bool:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in names for alias in node.names))
        for node in ast.walk(tree)
    )


def test_the_environment_is_read_in_at_most_one_file():
    readers = [relative(path) for path in python_files("qwisp") if reads_environment(parse(path))]
    assert len(readers) <= 1


@pytest.mark.parametrize(
    "source", ["os.environ['QWISP_X']", "os.getenv('X')", "from os import environ as e"]
)
def test_reading_the_environment_is_found_in_every_form(source):
    assert reads_environment(ast.parse(source))


INERT = """
import logging, os, threading
import mlx.core as mx

looked_up = []
plain = os._Environ.__getitem__
os._Environ.__getitem__ = lambda self, key: looked_up.append(key) or plain(self, key)

def state():
    named = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    ours = [logger for logger in named if logger.name.split(".")[0] == "qwisp"]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": [handler for logger in [logging.root, *ours] for handler in logger.handlers],
        "levels": [logging.root.level, *{logger.level for logger in ours} - {logging.NOTSET}],
        "device": mx.default_device(),
        "stream": mx.default_stream(mx.default_device()),
        "environment": dict(os.environ),
    }

before = state()
looked_up.clear()
import qwisp
asked = [key for key in looked_up if key.startswith("QWISP_")]
after = state()
assert asked == [], asked
changed = {key: (before[key], after[key]) for key in before if str(before[key]) != str(after[key])}
assert not changed, changed
"""


def test_import_is_inert():
    run = subprocess.run(
        [sys.executable, "-c", INERT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
