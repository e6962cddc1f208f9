"""Makes MLX's CPU backend disagree with itself exactly where a GPU would.

On the CPU every operation gives a row the same bits whatever else is in the call, so there a test
of exactness cannot fail. Inside `with adversarial(profile):` each matrix product and attention call
is put in a kernel class by `tests/dispatch.py`, and its reduction is cut as the class says
(`tests/kernel_masks.py`): same class, same bits for a row; other class, other bits; the value stays
right to rounding.

**Scale.** The embedded model is about an eighth as wide as a 35B model, and its shapes would fall
into other kernels. So widths (N and K) are multiplied by `scale` before they are classified. The
number of keys is too, which puts what changes at 1,024 and 4,096 keys of a real run at 128 and 512
keys of a test; heads count as 256 wide, with 8 query heads for each KV head. Rows, pairs, queries
and experts count as they are, and activations count as bf16 though tests run f32. `scale=1` takes
shapes as they are.

Patches are attributes of `mx`: they hold in every thread, and for nobody who took a function out of
`mx` before. Compilation is off inside, since a traced graph would carry one profile into the next.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import mlx.core as mx

from tests.call_shapes import (
    attention_problem,
    batch_shape,
    dense_problem,
    gathered_dense_problem,
    gathered_quantized_problem,
    quantized_problem,
)
from tests.class_check import check_classes_differ
from tests.dispatch import Attention, Convolution, Kernel, Problem, Profile
from tests.kernel_masks import Halves, cut, key_cut, split, split_attention

DEFAULT_SCALE = 8

REFUSED = (
    "block_masked_mm",
    "einsum",
    "gather_qqmm",
    "inner",
    "qqmm",
    "segmented_mm",
    "tensordot",
    "vecdot",
)
"""Products without a model of their dispatch: left alone they would be exact for nothing."""

# Taken before anything is patched.
_STOCK = SimpleNamespace(
    quantized_matmul=mx.quantized_matmul,
    gather_qmm=mx.gather_qmm,
    gather_mm=mx.gather_mm,
    matmul=mx.matmul,
    addmm=mx.addmm,
    conv1d=mx.conv1d,
    operator=mx.array.__matmul__,
)
_ACTIVE = threading.Lock()


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call that was made: the function's name, its shape before scaling, its class."""

    op: str
    problem: Problem
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class _Plan:
    call: Call
    parts: Halves | None
    keys: Halves | None = None


class Adversary:
    """Serves the patched functions under one profile, and remembers the kinds of calls it saw."""

    def __init__(self, profile: Profile, scale: int = DEFAULT_SCALE) -> None:
        self.profile = profile
        self.scale = scale
        # By the shapes of a call, which decide everything; looked up once per call.
        self._plans: dict[Hashable, _Plan] = {}

    def calls(self, op: str | None = None) -> list[Call]:
        """The kinds of calls seen since `clear()`, of one function or all, in order."""
        return [p.call for p in list(self._plans.values()) if op in (None, p.call.op)]

    def kernels(self, op: str, *, n: int | None = None, k: int | None = None) -> set[Kernel]:
        """The classes seen of one function, for weights of `n` outputs and `k` inputs if given.

        Two or more for one weight mean that a boundary was really crossed.
        """
        return {
            call.kernel
            for call in self.calls(op)
            if n in (None, getattr(call.problem, "n", None))
            and k in (None, getattr(call.problem, "k", None))
        }

    def clear(self) -> None:
        """Forgets the calls seen."""
        self._plans.clear()

    def _plan(self, key: Hashable, op: str, problem: Problem, k: int, dtype: mx.Dtype) -> _Plan:
        kernel = self.profile.kernel(problem.scaled(self.scale))
        keys = key_cut(kernel, problem.keys) if isinstance(problem, Attention) else None
        plan = _Plan(Call(op, problem, kernel), cut(kernel, k, dtype), keys)
        return self._plans.setdefault(key, plan)

    def quantized_matmul(
        self,
        x,
        w,
        /,
        scales,
        biases=None,
        transpose=True,
        group_size=None,
        bits=None,
        mode="affine",
        *,
        stream=None,
    ) -> mx.array:
        """`mx.quantized_matmul`."""
        key = ("qmm", x.shape, w.shape, transpose, group_size, bits, mode, x.dtype)
        plan = self._plans.get(key)
        if plan is None:
            problem = quantized_problem(x, w, transpose, group_size, bits, mode)
            plan = self._plan(key, "quantized_matmul", problem, x.shape[-1], x.dtype)

        def product(part: mx.array) -> mx.array:
            return _STOCK.quantized_matmul(
                part, w, scales, biases, transpose, group_size, bits, mode, stream=stream
            )

        return split(product, x, plan.parts)

    def gather_qmm(
        self,
        x,
        w,
        /,
        scales,
        biases=None,
        lhs_indices=None,
        rhs_indices=None,
        transpose=True,
        group_size=None,
        bits=None,
        mode="affine",
        global_scale=None,
        *,
        sorted_indices=False,
        stream=None,
    ) -> mx.array:
        """`mx.gather_qmm`."""
        indices = batch_shape(x, lhs_indices), batch_shape(w, rhs_indices)
        quantization = transpose, group_size, bits, mode
        key = ("gather_qmm", x.shape, w.shape, indices, quantization, sorted_indices, x.dtype)
        plan = self._plans.get(key)
        if plan is None:
            problem = gathered_quantized_problem(x, w, indices, *quantization, sorted_indices)
            plan = self._plan(key, "gather_qmm", problem, x.shape[-1], x.dtype)
        rest = (scales, biases, lhs_indices, rhs_indices, *quantization, global_scale)

        def product(part: mx.array) -> mx.array:
            return _STOCK.gather_qmm(part, w, *rest, sorted_indices=sorted_indices, stream=stream)

        return split(product, x, plan.parts)

    def gather_mm(
        self, a, b, /, lhs_indices=None, rhs_indices=None, *, sorted_indices=False, stream=None
    ) -> mx.array:
        """`mx.gather_mm`."""
        indices = batch_shape(a, lhs_indices), batch_shape(b, rhs_indices)
        key = ("gather_mm", a.shape, b.shape, indices, sorted_indices, a.dtype)
        plan = self._plans.get(key)
        if plan is None:
            problem = gathered_dense_problem(a, b, indices, sorted_indices)
            plan = self._plan(key, "gather_mm", problem, a.shape[-1], a.dtype)

        def product(part: mx.array) -> mx.array:
            return _STOCK.gather_mm(
                part, b, lhs_indices, rhs_indices, sorted_indices=sorted_indices, stream=stream
            )

        return split(product, a, plan.parts)

    def matmul(self, a, b, /, *, stream=None) -> mx.array:
        """`mx.matmul` and the operator `@`."""
        key = ("matmul", a.shape, b.shape, a.dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, "matmul", dense_problem(a, b), a.shape[-1], a.dtype)
        return split(lambda part: _STOCK.matmul(part, b, stream=stream), a, plan.parts)

    def addmm(self, c, a, b, /, alpha=1.0, beta=1.0, *, stream=None) -> mx.array:
        """`mx.addmm`."""
        key = ("addmm", a.shape, b.shape, a.dtype)
        plan = self._plans.get(key)
        if plan is None:
            problem = dense_problem(a, b, has_bias=True)
            plan = self._plan(key, "addmm", problem, a.shape[-1], a.dtype)
        if plan.parts is None:
            return _STOCK.addmm(c, a, b, alpha, beta, stream=stream)
        first, second = plan.parts
        rest = alpha * _STOCK.matmul(a * second, b, stream=stream)
        return _STOCK.addmm(c, a * first, b, alpha, beta, stream=stream) + rest

    def conv1d(self, x, weight, /, *args, **kwargs) -> mx.array:
        """`mx.conv1d`, cut over the taps of all channels."""
        key = ("conv1d", x.shape, weight.shape, weight.dtype)
        plan = self._plans.get(key)
        if plan is None:
            problem = Convolution(batch=x.shape[0], length=x.shape[1])
            plan = self._plan(key, "conv1d", problem, weight.size, weight.dtype)

        def product(part: mx.array) -> mx.array:
            return _STOCK.conv1d(x, part.reshape(weight.shape), *args, **kwargs)

        return split(product, weight.reshape(-1), plan.parts)

    def scaled_dot_product_attention(
        self, q, k, v, *, scale, mask=None, sinks=None, force_fused=False, stream=None
    ) -> mx.array:
        """`mx.fast.scaled_dot_product_attention`, without sinks."""
        if sinks is not None or force_fused or stream is not None:
            raise NotImplementedError("attention with sinks, force_fused or stream has no model")
        is_causal = isinstance(mask, str)
        key = ("attention", q.shape, k.shape, is_causal, isinstance(mask, mx.array))
        plan = self._plans.get(key)
        if plan is None:
            problem = attention_problem(q, k, mask)
            plan = self._plan(key, "scaled_dot_product_attention", problem, q.shape[-1], mx.float32)
        if is_causal:
            queries, length = q.shape[2], k.shape[2]
            positions = mx.arange(length - queries, length)[:, None]
            mask = positions >= mx.arange(length)
        return split_attention(q, k, v, scale, mask, plan.parts, plan.keys)


@contextlib.contextmanager
def adversarial(profile: Profile, *, scale: int = DEFAULT_SCALE) -> Iterator[Adversary]:
    """Patches `mx` for the whole process as the module says, and puts everything back at the end.

    Raises:
        RuntimeError: a profile is active already, in whatever thread.
        AssertionError: two kernel classes of the profile would give the same bits.
    """
    if not _ACTIVE.acquire(blocking=False):
        raise RuntimeError(
            f"adversarial({profile.name}): mx is patched already; leave the other profile first"
        )
    try:
        check_classes_differ(profile, scale)
        adversary = Adversary(profile, scale)
        with contextlib.ExitStack() as patches:
            for owner, name, replacement in _replacements(adversary):
                patches.enter_context(mock.patch.object(owner, name, replacement))
            patches.enter_context(_no_compilation())
            yield adversary
    finally:
        _ACTIVE.release()


def _replacements(adversary: Adversary) -> Iterator[tuple[object, str, Callable]]:
    names = ("quantized_matmul", "gather_qmm", "gather_mm", "matmul", "addmm", "conv1d")
    for name in names:
        yield mx, name, getattr(adversary, name)
    name = "scaled_dot_product_attention"
    yield mx.fast, name, getattr(adversary, name)

    # A plain function, which unlike a bound method becomes a method of the array.
    def operator(a: mx.array, b: object) -> mx.array:
        return adversary.matmul(a, b) if isinstance(b, mx.array) else _STOCK.operator(a, b)

    yield mx.array, "__matmul__", operator
    yield mx.array, "__imatmul__", operator
    for name in REFUSED:
        yield mx, name, _refusal(name)


def _refusal(name: str) -> Callable:
    def refuse(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"mx.{name} has no model of its kernels in tests/dispatch.py")

    return refuse


@contextlib.contextmanager
def _no_compilation() -> Iterator[None]:
    mx.disable_compile()
    try:
        yield
    finally:
        # MLX does not tell whether it was on; it is unless this variable is set.
        if "MLX_DISABLE_COMPILE" not in os.environ:
            mx.enable_compile()
