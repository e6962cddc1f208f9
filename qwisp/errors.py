"""The named errors of qwisp.

A message says what went wrong, what was found, what the limit is and what to do next. Errors raised
for the caller's fault derive from `QwispError`; a broken invariant of our own is `InvariantError`.
"""

from pathlib import Path


class QwispError(Exception):
    """Base of every error that qwisp raises on purpose."""


class ConfigError(QwispError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class RequestError(QwispError, ValueError):
    """A request can never be served: its prompt, lengths or sampling are out of range."""


class CheckpointError(QwispError):
    """A model folder cannot be used; the message names the file and, where there is one, the
    tensor."""


class ExpertReadError(QwispError):
    """The bytes of one expert could not be read; its slot was left empty (A5)."""

    def __init__(self, *, layer: int, expert: int, path: Path, offset: int, reason: str) -> None:
        super().__init__(
            f"expert {expert} of layer {layer}: cannot read {path} at byte {offset}: {reason}"
        )
        self.layer = layer
        self.expert = expert
        self.path = path
        self.offset = offset


class TraceError(QwispError):
    """A route trace cannot be written or read; the message names the file."""


class EngineClosed(QwispError):
    """The engine was closed, so it takes no more requests."""


class DeviceError(QwispError):
    """The compute device cannot run what was asked of it."""


class InvariantError(QwispError, AssertionError):
    """An invariant of docs/design.md was broken: a fault in qwisp itself. The message starts with
    its id."""
