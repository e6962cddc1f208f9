"""What an arena counts. Names and meanings are those of `qwisp.types.EngineStats`."""

from dataclasses import dataclass

from qwisp.types import LayerStats


@dataclass(slots=True)
class LayerCounters:
    """Running counts of one layer.

    Hits, misses and layer steps count when a step begins; passes and reads when the pass starts.
    """

    bytes_read: int = 0
    bytes_transferred: int = 0
    bytes_speculative: int = 0
    reads: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    layer_steps: int = 0
    split_layer_steps: int = 0
    passes: int = 0

    def count_step(self, *, num_hits: int, num_misses: int, num_passes: int) -> None:
        """Counts the beginning of a layer step; its passes count themselves as they start."""
        self.layer_steps += 1
        self.split_layer_steps += num_passes > 1
        self.expert_hits += num_hits
        self.expert_misses += num_misses

    def snapshot(self, layer: int) -> LayerStats:
        """The counts that are reported per layer."""
        return LayerStats(
            layer=layer,
            bytes_read=self.bytes_read,
            expert_hits=self.expert_hits,
            expert_misses=self.expert_misses,
            layer_steps=self.layer_steps,
            split_layer_steps=self.split_layer_steps,
            passes=self.passes,
        )


@dataclass(frozen=True)
class ArenaStats:
    """Counters of all layers since the arena was made. A snapshot: it does not change."""

    bytes_read: int
    bytes_transferred: int
    bytes_speculative: int
    reads: int
    """Read requests that layer steps demanded: one per tensor part, however many system calls."""
    expert_hits: int
    expert_misses: int
    layer_steps: int
    split_layer_steps: int
    passes: int
    read_wait_s: float
    """Time the caller stood still for reads."""
    compute_wait_s: float
    """Time the caller stood still for the fences of computations."""
    layers: tuple[LayerStats, ...]
