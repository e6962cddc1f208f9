"""Which kernel a GPU would run for a call: a model of how MLX 0.32.4 chooses by shape.

A *kernel class* is a hashable name such as `("qmm_t_splitk", 16)`. Two calls of one class give a
row the same sequence of roundings, whatever else is in the calls; two classes do not. The rules are
read from MLX's sources (`mlx/backend/metal/{quantized,matmul,scaled_dot_product_attention}.cpp` and
their namesakes under `mlx/backend/cuda/`). Where those leave a doubt, the model splits classes
rather than joins them: an engine that is exact here relies on nothing that was merely likely.

Pure: knows shapes, and nothing about arrays.

Not modelled: strides and alignment (operands are taken as row contiguous, the right side of a dense
product as a transposed weight), cuDNN's decode kernel, rope's two kernels (one expression in both),
and reductions over more than 256 rows.
"""

from dataclasses import dataclass, replace
from typing import Protocol

Kernel = tuple[str | int, ...]
"""A kernel class. A gathered product of one row has the class of the plain one it amounts to."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """`quantized_matmul` of `batch` problems `[rows, k] x [k, n]`; a 2-D weight makes `batch` 1."""

    rows: int
    n: int
    k: int
    bits: int = 4
    group_size: int = 64
    mode: str = "affine"
    batch: int = 1
    transpose: bool = True

    def scaled(self, factor: int) -> "Quantized":
        """The same call in a model `factor` times as wide."""
        return replace(self, n=_scale(self.n, factor), k=self.k * factor)


@dataclass(frozen=True, slots=True)
class Gathered:
    """`gather_qmm`, or `gather_mm` where `bits` is None: `pairs` problems `[rows, k] x [k, n]`."""

    pairs: int
    n: int
    k: int
    num_experts: int
    is_sorted: bool = False
    rows: int = 1
    bits: int | None = 4
    group_size: int = 64
    mode: str = "affine"
    transpose: bool = True

    def scaled(self, factor: int) -> "Gathered":
        """The same call in a model `factor` times as wide."""
        return replace(self, n=_scale(self.n, factor), k=self.k * factor)


@dataclass(frozen=True, slots=True)
class Dense:
    """`matmul`, or `addmm` where `has_bias`: `batch` problems `[rows, k] x [k, n]`.

    A batch that shares its right side counts as rows.
    """

    rows: int
    n: int
    k: int
    batch: int = 1
    has_bias: bool = False

    def scaled(self, factor: int) -> "Dense":
        """The same call in a model `factor` times as wide."""
        return replace(self, n=_scale(self.n, factor), k=self.k * factor)


@dataclass(frozen=True, slots=True)
class Attention:
    """`scaled_dot_product_attention`: `queries` by `keys` positions per sequence and head."""

    queries: int
    keys: int
    head_dim: int = 256
    heads_per_kv: int = 8
    batch: int = 1
    is_causal: bool = False
    has_array_mask: bool = False

    def scaled(self, factor: int) -> "Attention":
        """The same call with the heads of a 35B model and `factor` times the keys."""
        if factor == 1:
            return self
        return replace(
            self,
            keys=self.keys * factor,
            head_dim=256,
            heads_per_kv=8 if self.heads_per_kv > 1 else 1,
        )


@dataclass(frozen=True, slots=True)
class Convolution:
    """A depthwise `conv1d` over `length` positions of `batch` sequences."""

    batch: int
    length: int

    def scaled(self, factor: int) -> "Convolution":
        """Itself: neither number is a width."""
        return self


Problem = Quantized | Gathered | Dense | Attention | Convolution


def _scale(n: int, factor: int) -> int:
    # One output (a shared-expert gate) is one output in a model of any width.
    return n if n == 1 else n * factor


class Profile(Protocol):
    """A device, as far as its choice of kernels goes."""

    @property
    def name(self) -> str:
        """The device, for test ids and messages."""
        ...

    def kernel(self, problem: Problem) -> Kernel:
        """The class of the kernel that serves the call, with bf16 activations."""
        ...


@dataclass(frozen=True, slots=True)
class AppleGPU:
    """MLX's Metal backend. `generation` counts GPU families: M1 is 13, M3 15, M5 17."""

    name: str
    generation: int
    size: str
    """`g` base or Pro, `s` Max, `d` Ultra: the last letter of the architecture's name."""

    @property
    def has_nax(self) -> bool:
        """Matrix units with kernels of their own."""
        return self.generation >= 17

    def kernel(self, problem: Problem) -> Kernel:
        """The class of the kernel that serves the call, with bf16 activations."""
        match problem:
            case Quantized():
                return self._quantized(problem)
            case Gathered(bits=None):
                return self._gathered_dense(problem)
            case Gathered():
                return self._gathered_quantized(problem)
            case Dense():
                return self._dense(problem)
            case Attention():
                return self._attention(problem)
            case Convolution():
                # One thread per output loops over the taps.
                return ("depthwise_conv_1d",)

    def row_limit(self, n: int, k: int) -> int:
        """Rows from which a quantised product is a matrix product (`get_qmv_batch_limit`)."""
        if self.size == "d":
            small, middle, large = 32, 18, 12
        elif self.generation >= 17:
            small, middle, large = 33, 25, 13
        elif self.generation >= 15:
            small, middle, large = 13, 15, 13
        else:
            small, middle, large = 14, 10, 6
            if self.generation == 13 and self.size == "s":
                large = 7
        if k <= 2048 and n <= 2048:
            return small
        return middle if k <= 4096 and n <= 4096 else large

    def _quantized(self, p: Quantized) -> Kernel:
        if not p.transpose:
            if p.rows >= 4:
                return ("qmm_n",)
            return ("qvm",) if p.k < 1024 else ("qvm_split_k", 32 if p.k > 8192 else 8)
        if p.rows >= self.row_limit(p.n, p.k):
            return self._quantized_matrix(p)
        if p.k in (64, 128) and p.bits in (2, 4, 8):
            return ("qmv_quad",)
        if p.rows >= 2 and (p.mode != "affine" or self.generation >= 15):
            # Its tiles of 2 to 5 rows leave the order within a row alone.
            return ("qmv_wide",)
        return _metal_qmv(p.n, p.k, p.bits)

    def _quantized_matrix(self, p: Quantized) -> Kernel:
        splits = _metal_splits(p) if p.batch == 1 else 1
        if splits > 1:
            return ("qmm_t_splitk", splits)
        if self.has_nax and p.k % 64 == 0:
            return ("qmm_t_nax", 32 if p.rows <= 32 else 64)
        return ("qmm_t",)

    def _gathered_quantized(self, p: Gathered) -> Kernel:
        assert p.bits is not None
        if p.rows == 1 and p.is_sorted and p.pairs >= 16 and p.pairs // p.num_experts >= 4:
            return ("gather_qmm_rhs_nax",) if self.has_nax else ("gather_qmm_rhs",)
        if p.rows >= (self.row_limit(p.n, p.k) if p.transpose else 4):
            return ("gather_qmm_nax",) if self.has_nax and p.transpose else ("gather_qmm",)
        # Any number of pairs, each as a quantised product of one row.
        return _metal_qmv(p.n, p.k, p.bits) if p.transpose else ("gather_qvm",)

    def _gathered_dense(self, p: Gathered) -> Kernel:
        if p.rows == 1:
            return ("gather_mm_rhs", p.pairs) if p.is_sorted else ("gather_mv",)
        if p.n == 1:
            return ("gather_mv", "rows", p.k >= 16 * p.rows)
        if self.generation >= 15 and p.k % 4 == 0 and p.rows <= 15:
            return ("gather_mm_wide", _wide_lanes(p.rows, p.n))
        return ("gather_mm", p.rows)

    def _dense(self, p: Dense) -> Kernel:
        if p.rows == p.n == p.batch == 1:
            return ("dot_product",)
        if self.generation >= 15 and p.n > 1 and 1 < p.rows <= 15 and p.k % 4 == 0:
            return ("gemv_wide", _wide_lanes(p.rows, p.n))
        if min(p.rows, p.n) == 1:
            # Eight simdgroups share a row where it is long beside the number of outputs.
            return ("gemv", p.k >= 16 * max(p.rows, p.n))
        # Tiles and the number of splits are functions of all of these; no two row counts are safe.
        return ("steel_gemm_nax" if self.has_nax else "steel_gemm", p.rows, p.batch)

    def _attention(self, p: Attention) -> Kernel:
        nax_causal = self.has_nax and p.queries >= 1024 and p.is_causal
        if p.queries > 8:
            fused = p.head_dim in (64, 72, 80, 96, 128) or (p.head_dim == 256 and nax_causal)
            return ("steel_attention",) if fused else _unfused(p)
        if (
            p.head_dim not in (64, 96, 128, 256)
            or p.queries * p.heads_per_kv > 32
            or p.queries > p.keys
        ):
            return _unfused(p)
        is_large = self.size in "sd" and p.keys >= 1024
        if is_large or (p.heads_per_kv > 1 and p.keys >= 4096):
            return ("sdpa_vector_2pass", self._attention_blocks(p), p.queries)
        return ("sdpa_vector",)

    def _attention_blocks(self, p: Attention) -> int:
        simdgroups = p.heads_per_kv * p.queries
        if self.size == "s":
            if p.keys <= 1024 or simdgroups <= 4:
                return 64
            for limit, blocks in ((8192, 128), (32768, 256), (65536, 512)):
                if p.keys <= limit:
                    return blocks
            return 1024
        if self.size == "d":
            if simdgroups <= 2:
                return 256 if p.keys > 8192 else 128
            if simdgroups < 6 or p.keys < 16384:
                return 128
            return 512 if p.keys < 65536 else 1024
        return 64 if simdgroups >= 4 else 32


@dataclass(frozen=True, slots=True)
class CudaGPU:
    """MLX's CUDA backend, compute capability 8 or 9."""

    name: str

    def kernel(self, problem: Problem) -> Kernel:
        """The class of the kernel that serves the call, with bf16 activations."""
        match problem:
            case Quantized():
                # Its rule multiplies rows by batch: a 3-D weight changes nothing.
                if problem.transpose and problem.rows * problem.batch < 8:
                    return ("qmv",)
                return (self._quantized_matrix(problem),)
            case Gathered(bits=None):
                return self._gathered_dense(problem)
            case Gathered():
                return self._gathered_quantized(problem)
            case Dense():
                return self._dense(problem)
            case Attention():
                return self._attention(problem)
            case Convolution():
                # cuDNN's heuristics see the whole shape.
                return ("cudnn_conv", problem.batch, problem.length)

    def _quantized_matrix(self, p: Quantized | Gathered) -> str:
        tiles = p.n % 128 == 0 and p.k % max(64, p.group_size) == 0
        return "qmm_sm80" if tiles and p.bits in (4, 8) and p.transpose else "qmm_naive"

    def _gathered_quantized(self, p: Gathered) -> Kernel:
        matrix = self._quantized_matrix(p)
        is_grouped = p.rows == 1 and p.is_sorted and p.pairs >= 16
        if is_grouped and matrix == "qmm_sm80" and p.pairs // p.num_experts >= 4:
            return ("gather_qmm_rhs_sm80",)
        if p.transpose and p.pairs * p.rows < 8:
            return ("qmv",)
        # Each pair is a matrix product of its own.
        return (matrix, "per pair")

    def _gathered_dense(self, p: Gathered) -> Kernel:
        if p.rows == 1 and p.is_sorted:
            return ("grouped_gemm", p.pairs)
        return ("gather_mv",) if min(p.rows, p.n) == 1 else ("gather_mm", p.rows)

    def _dense(self, p: Dense) -> Kernel:
        if min(p.rows, p.n) == 1 and not p.has_bias:
            return ("gemv",)
        return ("cublaslt", p.rows, p.batch, p.has_bias)

    def _attention(self, p: Attention) -> Kernel:
        if p.head_dim not in (64, 96, 128) or p.has_array_mask:
            return _unfused(p)
        if p.queries >= 4:
            return ("cudnn_sdpa", p.batch, p.queries, p.keys)
        return ("sdpa_vector",) if p.keys <= 1024 else ("sdpa_vector_2pass", 32, p.queries)


def _metal_qmv(n: int, k: int, bits: int) -> Kernel:
    """The kernel for one row: fixed by the weight alone."""
    pack = 8 if bits in (3, 5) else 4 if bits == 6 else 32 // bits
    step = pack * (1 if bits == 2 else 2) * 32
    return ("qmv_fast",) if n % 8 == 0 and k % step == 0 else ("qmv",)


def _metal_splits(p: Quantized) -> int:
    """Parts of K that qmm_splitk sums apart, aiming at 512 threadgroups."""
    tiles = -(-p.n // 32) * -(-p.rows // 32)
    unit = max(p.group_size, 32)
    splits = min(max(1, 512 // tiles), p.k // unit)
    while splits > 1 and p.k % (splits * unit):
        splits -= 1
    return max(splits, 1)


def _wide_lanes(rows: int, n: int) -> int:
    """Lanes that share a row's K in the kernels for 2 to 15 dense rows."""
    return 32 if rows <= 5 or n <= 64 else 16


def _unfused(p: Attention) -> Kernel:
    # Matrix product, softmax, matrix product: general kernels, chosen anew for every shape.
    return ("unfused", p.batch, p.queries, p.keys)


M1 = AppleGPU("M1", 13, "g")
M1_ULTRA = AppleGPU("M1_ULTRA", 13, "d")
M3 = AppleGPU("M3", 15, "g")
M5 = AppleGPU("M5", 17, "s")
"""An M5 Max, whose attention changes at 1,024 keys and again at every few doublings."""
CUDA = CudaGPU("CUDA")
PROFILES: tuple[Profile, ...] = (M1, M1_ULTRA, M3, M5, CUDA)
