"""What one lane owns: keys and values per attention layer, recurrent state per GDN layer."""

import mlx.core as mx

from qwisp.errors import InvariantError


class KVArena:
    """Keys and values of one lane in one attention layer, reserved once and never moved.

    Layout `[reserved, kv_heads, head_dim]`: a prefix is contiguous and its strides do not depend on
    the reservation, so neither do the bits of attention.

    Invariants: L2 (a lane never writes past its reservation).
    """

    def __init__(self, reserved: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        self.reserved = reserved
        self.length = 0
        # Zeros, not garbage: a masked key still meets its value as 0 * value, and 0 * NaN is NaN.
        self._keys = mx.zeros((reserved, kv_heads, head_dim), dtype)
        self._values = mx.zeros((reserved, kv_heads, head_dim), dtype)

    def append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next tokens, `[tokens, kv_heads, head_dim]`, and return all keys and values so
        far.

        The write is in place as long as nobody else holds the arrays: callers drop what was
        returned before the next append is evaluated.
        """
        # An assignment would convert in silence.
        assert k.dtype == v.dtype == self._keys.dtype, (k.dtype, v.dtype, self._keys.dtype)
        end = self.length + k.shape[0]
        if end > self.reserved:
            raise InvariantError(
                f"L2: {end} tokens do not fit in a K/V reservation of {self.reserved}"
            )
        self._keys[self.length : end] = k
        self._values[self.length : end] = v
        self.length = end
        return self._keys[:end], self._values[:end]

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Whole keys and values, to be evaluated or measured, not kept."""
        return self._keys, self._values


class GDNState:
    """State of one lane in one GDN layer; its size does not grow with the sequence.

    `conv`: the last `taps - 1` inputs of the convolution, in the activation dtype. `recurrence`:
    f32 `[value_heads, value_dim, key_dim]`; in 16 bits it drifts into nonsense.
    """

    def __init__(
        self,
        *,
        conv_shape: tuple[int, int],
        recurrence_shape: tuple[int, int, int],
        dtype: mx.Dtype,
    ) -> None:
        self._conv = mx.zeros(conv_shape, dtype)
        self._recurrence = mx.zeros(recurrence_shape, mx.float32)

    @property
    def conv(self) -> mx.array:
        """Convolution history, `[taps - 1, channels]`."""
        return self._conv

    @property
    def recurrence(self) -> mx.array:
        """Recurrent state, f32 `[value_heads, value_dim, key_dim]`."""
        return self._recurrence

    def advance(self, conv: mx.array, recurrence: mx.array) -> None:
        """Replace both parts by those after the tokens just computed; shapes and dtypes stay."""
        assert (conv.shape, conv.dtype) == (self._conv.shape, self._conv.dtype)
        assert (recurrence.shape, recurrence.dtype) == (self._recurrence.shape, mx.float32)
        self._conv, self._recurrence = conv, recurrence

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Both parts, to be evaluated or measured."""
        return self._conv, self._recurrence


class LaneState:
    """All state of one lane, one entry per layer, and how many of its tokens have been computed."""

    def __init__(self, layers: list[KVArena | GDNState]) -> None:
        self.layers = layers
        self.length = 0

    def arrays(self) -> list[mx.array]:
        """Every array of the lane, to be evaluated together."""
        return [array for layer in self.layers for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(array.nbytes for array in self.arrays())

    def check(self) -> None:
        """Raise InvariantError unless every layer stands at the lane's length, inside its
        reservation."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KVArena) and not (self.length == layer.length <= layer.reserved):
                raise InvariantError(
                    f"L2: layer {index} holds {layer.length} of {layer.reserved} reserved tokens "
                    f"while the lane stands at {self.length}"
                )
