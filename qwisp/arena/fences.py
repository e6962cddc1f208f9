"""Keeps slots from being overwritten while a computation reads them (A3)."""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from qwisp.errors import InvariantError


class SlotUse:
    """Slots of one layer that were handed out to be computed from."""

    __slots__ = ("experts", "layer", "output", "slots")

    def __init__(self, layer: int, experts: tuple[int, ...], slots: tuple[int, ...]) -> None:
        self.layer = layer
        self.experts = experts
        self.slots = slots
        self.output: mx.array | None = None
        """The result of the computation; None: not handed in yet."""


class Fences:
    """The uses of slots that may not be over.

    Invariant A3: a slot that a submitted, unfinished computation reads is never overwritten. A use
    ends when its output has been waited for; a slot may be overwritten when no use here has it.
    """

    def __init__(self) -> None:
        self._uses: dict[int, list[SlotUse]] = {}

    def __iter__(self) -> Iterator[SlotUse]:
        for uses in self._uses.values():
            yield from uses

    def hold(self, layer: int, experts: tuple[int, ...], slots: tuple[int, ...]) -> SlotUse:
        """Notes that slots are handed out, until the output set in the result is waited for."""
        use = SlotUse(layer, experts, slots)
        self._uses.setdefault(layer, []).append(use)
        return use

    def wait(self) -> None:
        """Waits for every output that was handed in and forgets its use.

        An output that cannot be computed is forgotten too, once nothing runs any more.
        """
        if not self._uses:
            return
        outputs = [use.output for use in self if use.output is not None]
        try:
            mx.eval(outputs)
        except BaseException:
            mx.synchronize()
            raise
        finally:
            self._keep_only_unfenced()

    def abandon(self, layer: int) -> None:
        """Forgets a layer's uses that never got an output, once nothing that was submitted runs."""
        uses = self._uses.get(layer, [])
        fenced = [use for use in uses if use.output is not None]
        if len(fenced) < len(uses):
            mx.synchronize()
            self._uses[layer] = fenced

    def assert_free(self, layer: int, slots: Sequence[int]) -> None:
        """Refuses to let slots be overwritten that are in use.

        Raises:
            InvariantError: A3 would be broken.
        """
        for use in self._uses.get(layer, ()):
            for slot in slots:
                if slot in use.slots:
                    raise InvariantError(
                        f"A3: slot {slot} of layer {layer} would be overwritten while a "
                        f"computation may read it"
                    )

    def _keep_only_unfenced(self) -> None:
        unfenced = {
            layer: [use for use in uses if use.output is None] for layer, uses in self._uses.items()
        }
        self._uses = {layer: uses for layer, uses in unfenced.items() if uses}
