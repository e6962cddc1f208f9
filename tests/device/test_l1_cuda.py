"""L1 on a CUDA GPU, with the embedded model. By hand: `python -m pytest -m device tests/device`."""

import dataclasses
import random
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from qwisp.engine.loading import EMBEDDED_MODEL
from qwisp.engine.tokenizer import Tokenizer
from qwisp.kernels.numerics import Numerics, device_numerics
from tests.l1 import decode_lanes, load, serve
from tests.synthetic import make_checkpoint

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not mx.cuda.is_available(), reason="MLX has no CUDA device here"),
]

ALL_EXPERTS = 64
NUM_STEPS = 12
REAL_TEXT = Path(__file__).parents[2] / "docs" / "design.md"


def _rules(dtype: str = "float32", **broken: object) -> Numerics:
    """The device's own rules, or a twin that breaks some of them."""
    rules = device_numerics(dtype=dtype, prefill_chunk=2048)
    assert rules.device.startswith("cuda")
    return dataclasses.replace(rules, **broken)


def _text_tokens(num_tokens: int) -> tuple[int, ...]:
    tokenizer = Tokenizer.load(EMBEDDED_MODEL, (), 8192)
    tokens = tokenizer.encode(REAL_TEXT.read_text(encoding="utf-8"))[:num_tokens]
    assert len(tokens) == num_tokens
    return tokens


def _prompts(vocab: int = 8192) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab) for _ in range(length)] for length in (3, 40, 1, 17, 5, 70, 9, 2)]


def _decoded(
    rules: Numerics, capacity: int, groups: list[list[list[int]]], folder: Path | None = None
) -> list[list[str]]:
    """Logits digests of each group of prompts decoded in one batch, group after group."""
    loaded = load(folder, rules, capacity)
    try:
        return [digests for group in groups for digests in decode_lanes(loaded, group, NUM_STEPS)]
    finally:
        loaded.arena.check()
        loaded.arena.close()


@pytest.fixture(scope="module")
def solo() -> list[list[str]]:
    return _decoded(_rules(), ALL_EXPERTS, [[prompt] for prompt in _prompts()])


def test_L1_streamed_equals_resident_on_cuda() -> None:
    # The longest passes 1,024 keys while it decodes; the shortest generates longest.
    prompts, limits = [_text_tokens(length) for length in (7, 230, 1010)], (300, 24, 24)
    expected = serve(None, _rules(), ALL_EXPERTS, prompts, limits)
    assert serve(None, _rules(), ALL_EXPERTS, prompts, limits) == expected, "a repeated run"
    for capacity in (8, 24):
        assert serve(None, _rules(), capacity, prompts, limits) == expected, f"C={capacity}"


@pytest.mark.parametrize("capacity", [12, ALL_EXPERTS])
def test_L1_rows_of_one_to_eight_lanes_equal_their_solo_runs_on_cuda(
    capacity: int, solo: list[list[str]]
) -> None:
    prompts = _prompts()
    counts = range(1, len(prompts) + 1)
    digests = iter(_decoded(_rules(), capacity, [prompts[:count] for count in counts]))
    for count in counts:
        assert [next(digests) for _ in range(count)] == solo[:count], f"{count} lanes"


def test_twin_that_batches_rows_without_tiles_differs_on_cuda(solo: list[list[str]]) -> None:
    naive = _rules(linear_rows=(1, 1 << 20))
    one, *together = _decoded(naive, ALL_EXPERTS, [_prompts()[:1], _prompts()])
    assert one == solo[0]
    assert together != solo


def test_twin_that_does_not_pad_pairs_differs_on_cuda(solo: list[list[str]]) -> None:
    # Two lanes have up to 16 experts: at C=8 a pass of a few pairs falls below 8.
    prompts = _prompts()[:2]
    assert _decoded(_rules(), 8, [prompts]) == solo[:2]
    assert _decoded(_rules(gather_pairs_min=1), 8, [prompts]) != solo[:2]


def test_greedy_tokens_are_those_of_mlx_lm_on_cuda() -> None:
    prompt = _text_tokens(64)
    model, _ = load_model(EMBEDDED_MODEL)
    theirs = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=32)]
    (ours,) = serve(None, _rules(), ALL_EXPERTS, [prompt], (32,))
    assert list(ours.token_ids) == theirs[: len(ours.token_ids)]


def test_L1_in_bfloat16_at_the_widths_of_a_35b_model_on_cuda(tmp_path: Path) -> None:
    """16 bits take other kernels than f32: tensor cores from 8 rows on, cuDNN in prefill."""
    folder = make_checkpoint(
        tmp_path / "wide",
        hidden=2048,
        moe_intermediate=512,
        shared_intermediate=512,
        experts=ALL_EXPERTS,
        dtype="bfloat16",
    )
    prompts, rules = _prompts(512), _rules("bfloat16")
    solo = _decoded(rules, ALL_EXPERTS, [[prompt] for prompt in prompts], folder)
    for capacity in (8, 12, ALL_EXPERTS):
        assert _decoded(rules, capacity, [prompts], folder) == solo, f"C={capacity}"
    for broken in ({"linear_rows": (1, 1 << 20)}, {"gather_pairs_min": 1}):
        naive = _rules("bfloat16", **broken)
        assert _decoded(naive, 8, [prompts], folder) != solo, f"{broken}"
