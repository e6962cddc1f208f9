"""What a bench shows on stderr while it works."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressDisplay:
    """A bar over the requests of a run, a second one while an engine loads, and lines that stay."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # Where nobody watches, bars are noise; lines still come.
            disable=not console.is_terminal,
        )
        self._run = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, num_requests: int) -> None:
        """Say how many requests the run has."""
        self._progress.update(self._run, total=num_requests)

    def show(self, text: str) -> None:
        """Say what is being done."""
        self._progress.update(self._run, description=text)

    def advance(self) -> None:
        """One request is done."""
        self._progress.advance(self._run)

    def print(self, line: str) -> None:
        """Write a line that stays above the bars."""
        self._progress.console.print(line, markup=False, highlight=False)

    @contextmanager
    def loading(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """Gives an `on_progress` for `Engine.load`, with a bar of its own until the block ends."""
        load = self._progress.add_task(text, total=None)
        megabyte = 1 << 20
        try:
            yield lambda done, total: self._progress.update(
                load, completed=done // megabyte, total=total // megabyte
            )
        finally:
            self._progress.remove_task(load)
