"""The forward on rows: prefill of one lane in canonical chunks, decode of one row per lane."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from qwisp.arena import ExpertArena
from qwisp.engine.checkpoint import Checkpoint
from qwisp.engine.layers import FeedForward, RowBatch, RowMath, decoder_layer
from qwisp.engine.moe import MoEBlock
from qwisp.engine.spec import ModelSpec
from qwisp.engine.weights import ModelWeights, MoEWeights, SwiGLUWeights
from qwisp.kernels.experts import ExpertBank
from qwisp.kernels.linear import Phase, embed
from qwisp.kernels.numerics import Numerics
from qwisp.kernels.weights import QuantizedWeight
from qwisp.lanes.state import GDNState, KVArena, LaneState


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Logits of one decode step, `[rows, vocab]`, and the routes no host has looked at yet."""

    logits: mx.array
    routes: tuple[tuple[int, mx.array], ...]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How far a prefill has come."""

    tokens_done: int
    """The tokens of a chunk in work count in proportion to the layers done."""
    is_chunk_done: bool


class Model:
    """Weights, rules and experts of one checkpoint. Owns no lane: states are passed in."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: ModelWeights,
        arena: ExpertArena,
        numerics: Numerics,
    ) -> None:
        self.spec: ModelSpec = checkpoint.spec
        self.numerics = numerics
        self._weights = weights
        self._arena = arena
        self._dtype: mx.Dtype = getattr(mx, checkpoint.dtype)
        self._moe: list[MoEBlock] = []
        self._feed_forward: list[FeedForward] = []
        for index, layer in enumerate(weights.layers):
            if isinstance(layer.feed_forward, MoEWeights):
                block = MoEBlock(
                    index,
                    self.spec.moe,
                    layer.feed_forward,
                    _expert_bank(checkpoint, arena, index),
                    arena,
                )
                self._moe.append(block)
                self._feed_forward.append(block)
            else:
                self._feed_forward.append(_Dense(layer.feed_forward))

    @property
    def compute_wait_s(self) -> float:
        """Seconds spent waiting for routers since load."""
        return sum(block.compute_wait_s for block in self._moe)

    def new_lane(self, reserved_tokens: int) -> LaneState:
        """State of a lane at position 0 with room for `reserved_tokens`."""
        layers: list[KVArena | GDNState] = []
        attention, gdn = self.spec.attention, self.spec.gdn
        for layer in self.spec.layers:
            if layer.mixer == "attention":
                layers.append(
                    KVArena(
                        reserved_tokens, attention.num_kv_heads, attention.head_dim, self._dtype
                    )
                )
            else:
                assert gdn is not None
                layers.append(
                    GDNState(
                        conv_shape=(gdn.conv_taps - 1, gdn.conv_channels),
                        recurrence_shape=(
                            gdn.num_value_heads,
                            gdn.value_head_dim,
                            gdn.key_head_dim,
                        ),
                        dtype=self._dtype,
                    )
                )
        return LaneState(layers)

    def prefill(self, token_ids: Sequence[int], state: LaneState) -> Iterator[PrefillProgress]:
        """Advance a lane over `token_ids`, pausing after every layer.

        Chunks end at multiples of `prefill_chunk`, whatever the lane's position, so equal positions
        always meet equal calls. Nothing is computed unless the iterator is consumed; the state may
        be used again once it is exhausted.
        """
        done = 0
        while done < len(token_ids):
            size = self.numerics.prefill_chunk - state.length % self.numerics.prefill_chunk
            chunk = token_ids[done : done + size]
            for layers_done in self._prefill_chunk(chunk, state):
                share = len(chunk) * layers_done // len(self._weights.layers)
                yield PrefillProgress(done + share, is_chunk_done=False)
            done += len(chunk)
            yield PrefillProgress(done, is_chunk_done=True)

    def _prefill_chunk(self, chunk: Sequence[int], state: LaneState) -> Iterator[int]:
        batch = RowBatch("prefill", (state,), len(chunk))
        math = RowMath(self.numerics, "prefill")
        x = embed(mx.array(list(chunk), dtype=mx.uint32), self._weights.embed_tokens)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            # No logits come from a prefill, so of the last layer only the state is needed.
            feed_forward = self._feed_forward[index] if index < last else None
            x = decoder_layer(x, index, layer, self.spec, batch, math, feed_forward)
            mx.async_eval(state.layers[index].arrays)
            if index < last:
                yield index + 1
        mx.eval(state.arrays())
        state.length += len(chunk)
        state.check()
        self._observe(math.unseen_routes, "prefill")

    def decode(self, token_ids: mx.array, states: Sequence[LaneState]) -> DecodeStep:
        """Advance each lane by one token.

        token_ids: uint32 `[lanes]`, which may be the unevaluated result of the step before. With
        every expert resident nothing is evaluated here; otherwise each layer waits for its router.
        """
        batch = RowBatch("decode", tuple(states), len(states))
        math = RowMath(self.numerics, "decode")
        x = embed(token_ids, self._weights.embed_tokens)
        for index, layer in enumerate(self._weights.layers):
            x = decoder_layer(x, index, layer, self.spec, batch, math, self._feed_forward[index])
        for state in states:
            state.length += 1
        x = mx.fast.rms_norm(x, self._weights.norm, self.spec.rms_norm_eps)
        logits = math.linear(x, self._weights.lm_head)
        return DecodeStep(logits, tuple(math.unseen_routes))

    def observe(self, step: DecodeStep) -> None:
        """Account for the routes of a step whose logits have been evaluated."""
        self._observe(step.routes, "decode")

    def _observe(self, routes: Sequence[tuple[int, mx.array]], kind: Phase) -> None:
        for layer, ids in routes:
            self._arena.observe(layer, np.array(ids), kind=kind)


class _Dense:
    """The feed-forward part of a layer without experts."""

    def __init__(self, weights: SwiGLUWeights) -> None:
        self._weights = weights

    def __call__(self, x: mx.array, math: RowMath) -> mx.array:
        return math.swiglu(x, self._weights)


def _expert_bank(checkpoint: Checkpoint, arena: ExpertArena, layer: int) -> ExpertBank:
    parts = arena.bank(layer)

    def projection(name: str) -> QuantizedWeight:
        return QuantizedWeight(
            parts[f"{name}.weight"],
            parts[f"{name}.scales"],
            parts[f"{name}.biases"],
            checkpoint.expert_quantization(layer, name),
        )

    return ExpertBank(projection("gate_proj"), projection("up_proj"), projection("down_proj"))
