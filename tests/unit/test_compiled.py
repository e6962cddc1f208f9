"""Compiled functions in threads that end."""

import subprocess
import sys

import mlx.core as mx

from qwisp.kernels.compiled import compiled

# A process that exits right after its computing thread ended. With `mx.compile` itself about half
# of such processes abort (MLX 0.32.4, Python 3.11), so eight in a row do not all pass by luck.
EXITS = """
import threading, mlx.core as mx
from qwisp.kernels.compiled import compiled
functions = [compiled()(lambda x, i=i: x * i + mx.sigmoid(x)) for i in range(30)]
def work():
    for function in functions:
        mx.eval(function(mx.ones((4,))))
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_process_exits_cleanly_right_after_a_computing_thread_ended() -> None:
    for _ in range(8):
        subprocess.run([sys.executable, "-c", EXITS], check=True)


def test_compiled_function_keeps_its_name_and_traces_once_per_shape() -> None:
    traces = []

    @compiled()
    def double(x: mx.array) -> mx.array:
        """Twice."""
        traces.append(x.shape)
        return x + x

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    for _ in range(3):
        assert double(mx.ones((2,))).tolist() == [2.0, 2.0]
    assert traces == [(2,)]
