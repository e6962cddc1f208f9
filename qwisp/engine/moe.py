"""The mixture-of-experts block: the router's choice meets the arena, pass by pass."""

import time

import mlx.core as mx
import numpy as np

from qwisp.arena import ExpertArena, LayerStep
from qwisp.engine.layers import RowMath
from qwisp.engine.spec import MoESpec
from qwisp.engine.weights import MoEWeights
from qwisp.kernels.elementwise import sigmoid_gate
from qwisp.kernels.experts import ExpertBank, combine, expert_pairs, expert_rows, place, route


class MoEBlock:
    """Routed experts of one layer, plus the shared one.

    While an expert is missing the host must know the routes, so a streaming layer waits once for
    its router. A resident layer of few rows does not: expert `e` is in slot `e`, and the routes are
    left in the call's `unseen_routes`.
    """

    def __init__(
        self, layer: int, spec: MoESpec, weights: MoEWeights, bank: ExpertBank, arena: ExpertArena
    ) -> None:
        self.layer = layer
        self.compute_wait_s = 0.0
        """Time spent waiting for the router's ids."""
        self._spec = spec
        self._weights = weights
        self._bank = bank
        self._arena = arena

    def __call__(self, x: mx.array, math: RowMath) -> mx.array:
        """`[rows, hidden]` to the same."""
        w, spec = self._weights, self._spec
        ids, scores = route(
            math.linear(x, w.router), top_k=spec.top_k, norm_topk_prob=spec.norm_topk_prob
        )
        shared = self._shared(x, math)
        expert_major = math.phase == "prefill" and x.shape[0] >= math.numerics.expert_major_tokens
        if self._arena.is_resident and not expert_major:
            placed = self._resident_pairs(x, ids, math)
        else:
            placed = self._streamed(x, ids, shared, math, expert_major=expert_major)
        routed = combine(placed, scores)
        return routed if shared is None else routed + shared

    def _shared(self, x: mx.array, math: RowMath) -> mx.array | None:
        w = self._weights
        if w.shared_expert is None or w.shared_expert_gate is None:
            return None
        return sigmoid_gate(math.swiglu(x, w.shared_expert), math.linear(x, w.shared_expert_gate))

    def _resident_pairs(self, x: mx.array, ids: mx.array, math: RowMath) -> mx.array:
        math.unseen_routes.append((self.layer, ids))
        num_rows, top_k = ids.shape
        row_idx = mx.array(np.repeat(np.arange(num_rows, dtype=np.uint32), top_k))
        return expert_pairs(x, row_idx, ids.reshape(-1), self._bank, math.numerics)

    def _streamed(
        self,
        x: mx.array,
        ids: mx.array,
        shared: mx.array | None,
        math: RowMath,
        *,
        expert_major: bool,
    ) -> mx.array:
        mx.async_eval(ids)
        if shared is not None:
            # A submission of its own: the device works on it while the host reads experts.
            mx.async_eval(shared)
        started = time.perf_counter()
        routes = np.array(ids)
        self.compute_wait_s += time.perf_counter() - started
        step = self._arena.begin(self.layer, routes, kind=math.phase)
        if expert_major:
            return self._by_expert(x, routes, step, math)
        return self._by_pair(x, step, math)

    def _by_pair(self, x: mx.array, step: LayerStep, math: RowMath) -> mx.array:
        outputs, places = [], []
        for expert_pass in step:
            row_idx = (expert_pass.pair_idx // self._spec.top_k).astype(np.uint32)
            slots = expert_pass.pair_slots.astype(np.uint32)
            y = expert_pairs(x, mx.array(row_idx), mx.array(slots), self._bank, math.numerics)
            mx.async_eval(y)
            step.fence(y)
            outputs.append(y)
            places.append(expert_pass.pair_idx)
        return place(outputs, places)

    def _by_expert(
        self, x: mx.array, routes: np.ndarray, step: LayerStep, math: RowMath
    ) -> mx.array:
        """All rows of an expert in one call, so that its shape depends on the prompt alone."""
        outputs, places = [], []
        flat_routes = routes.reshape(-1)
        for expert_pass in step:
            pair_experts = flat_routes[expert_pass.pair_idx]
            order = np.argsort(pair_experts, kind="stable")
            pairs = expert_pass.pair_idx[order]
            rows = x[mx.array((pairs // self._spec.top_k).astype(np.uint32))]
            ends = np.searchsorted(pair_experts[order], expert_pass.experts, side="right")
            start, pass_outputs = 0, []
            for slot, end in zip(expert_pass.slots, ends.tolist(), strict=True):
                pass_outputs.append(expert_rows(rows[start:end], slot, self._bank, math.numerics))
                start = end
            y = mx.concatenate(pass_outputs)
            mx.async_eval(y)
            step.fence(y)
            outputs.append(y)
            places.append(pairs)
        return place(outputs, places)
