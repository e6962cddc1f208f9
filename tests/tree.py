"""The repository as data, for the tests that read it: paths and syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python_files(*folders: str) -> list[Path]:
    """All Python files below these folders of the repository, in a fixed order."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files, folders
    return files


def relative(path: Path) -> str:
    """A file's name from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """The dotted name of a file of the package; of an `__init__.py`, its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name, such as `ExpertArena.begin`."""

    def visit(node: ast.AST, prefix: str) -> Iterator:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{prefix}{child.name}" if named else prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child
            yield from visit(child, f"{name}." if named else prefix)

    yield from visit(tree, "")
