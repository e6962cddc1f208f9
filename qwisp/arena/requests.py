"""One read and how it ended: the words that the arena and its readers share."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Bytes of a file, from `offset` on, to scatter into `buffers` in their order."""

    path: Path
    offset: int
    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """Why a request was given up, and at which byte of the file."""

    offset: int
    cause: OSError | EOFError


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """How a request ended. Without a failure, all its buffers are filled."""

    bytes_transferred: int
    """Bytes moved in all attempts together."""
    failure: ReadFailure | None = None
