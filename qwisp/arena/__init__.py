"""Bytes, files, slots and expert ids within a budget. Knows nothing of tokens or lanes."""

from qwisp.arena.arena import ExpertArena, ExpertPass, LayerStep
from qwisp.arena.reader import PreadReader
from qwisp.arena.trace import TraceWriter, read_trace

__all__ = ["ExpertArena", "ExpertPass", "LayerStep", "PreadReader", "TraceWriter", "read_trace"]
