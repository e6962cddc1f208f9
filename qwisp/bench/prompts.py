"""What the bench generates from: three short built-in prompts, or the reader's own file."""

import json
from dataclasses import dataclass
from pathlib import Path

from qwisp.errors import ConfigError
from qwisp.types import Prompt


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt and the name it has in the report."""

    name: str
    content: Prompt


BUILT_IN = (
    BenchPrompt("code", "def read_lines(path: str) -> list[str]:\n"),
    BenchPrompt(
        "prose",
        "The rain had stopped before dawn, and when the keeper came down the narrow stairs of the "
        "lighthouse, his lamp still in his hand, he",
    ),
    BenchPrompt(
        "chat", ({"role": "user", "content": "Name three things to take on a long walk."},)
    ),
)
"""One per kind of text, because each kind routes to other experts."""


def read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """Prompts of a file.

    A `.jsonl` file has one prompt per line: a JSON string, or a list of chat messages or token ids.
    Any other file is one prompt as a whole.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no prompt; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"prompt file {path}: {cause}") from cause
    if not text.strip():
        raise ConfigError(f"prompt file {path} is empty: write at least one prompt into it")
    if path.suffix != ".jsonl":
        return (BenchPrompt(path.stem, text),)
    return tuple(
        BenchPrompt(f"{path.stem}:{number}", _parse(line, f"prompt file {path}, line {number}"))
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    )


def _parse(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as cause:
        raise ConfigError(f"{where}: {cause}") from cause
    if not value or not isinstance(value, str | list):
        raise ConfigError(f"{where}: write a JSON string, or a list of chat messages or token ids")
    return value
