"""`mx.compile` for functions that a thread may outlive its use of."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import mlx.core as mx

P = ParamSpec("P")
R = TypeVar("R")


def compiled(*, shapeless: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: compile the function anew in each thread that calls it.

    MLX keeps what it traced per thread, with references to Python objects. Were one compiled
    function shared, a thread that ends would drop those after Python considers it gone, and a
    process that exits meanwhile would abort. A copy in Python's own thread-local storage is dropped
    just before.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        local = threading.local()

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            own: Callable[P, R] | None = getattr(local, "compiled", None)
            if own is None:
                own = local.compiled = mx.compile(function, shapeless=shapeless)
            return own(*args, **kwargs)

        return call

    return decorate
