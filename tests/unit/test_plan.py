"""From a memory budget to a capacity: what fits, what is refused, and with which advice."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwisp.arena.source import ExpertLayer, ExpertPart
from qwisp.config import EngineConfig
from qwisp.engine.plan import DeviceFacts, ModelFacts, plan
from qwisp.engine.spec import AttentionSpec, GDNSpec, LayerSpec, ModelSpec, MoESpec
from qwisp.errors import ConfigError
from qwisp.kernels.numerics import rules_for

MIB = 1 << 20
GIB = 1 << 30
MAC = DeviceFacts("metal-applegpu_g15g", 16 * GIB)
RULES = rules_for("metal-applegpu_g15g", dtype="bfloat16", prefill_chunk=2048)


def _spec_35b() -> ModelSpec:
    kinds = ("gdn", "gdn", "gdn", "attention") * 10
    return ModelSpec(
        model_type="qwen3_5_moe",
        hidden_size=2048,
        vocab_size=248320,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=262144,
        layers=tuple(LayerSpec(kind, "moe") for kind in kinds),
        attention=AttentionSpec(16, 2, 256, 64, 1e7, True),
        gdn=GDNSpec(16, 32, 128, 128, 4),
        moe=MoESpec(256, 8, True, 512, 512),
        eos_token_ids=(),
    )


def _experts_35b() -> tuple[ExpertLayer, ...]:
    sizes = {"weight": 512 * 2048 // 2, "scales": 512 * 32 * 2, "biases": 512 * 32 * 2}
    parts = tuple(
        ExpertPart(f"{proj}.{kind}", Path("m"), 0, nbytes, (nbytes,), "uint8")
        for proj in ("gate_proj", "up_proj", "down_proj")
        for kind, nbytes in sizes.items()
    )
    return tuple(ExpertLayer(layer, 256, parts) for layer in range(40))


MODEL = ModelFacts("35b", _spec_35b(), "bfloat16", 1_300_000_000, _experts_35b())


def test_known_sizes_of_the_35b_shape() -> None:
    planned = plan(EngineConfig(), MODEL, MAC, RULES)
    assert MODEL.expert_layers[0].expert_nbytes == 1_769_472
    assert planned.kv_bytes_per_token == 20_480
    assert round(planned.gdn_bytes_per_lane / 1e6) in range(62, 66)
    assert planned.arena_bytes == planned.capacity * 40 * 1_769_472
    assert 8 <= planned.capacity < 256


@given(st.integers(3 * GIB, 64 * GIB))
def test_auto_never_plans_above_the_budget_and_wastes_less_than_one_slot(budget: int) -> None:
    planned = plan(EngineConfig(memory_budget_bytes=budget), MODEL, MAC, RULES)
    assert planned.total_bytes <= budget
    if not planned.is_resident:
        assert budget - planned.total_bytes < 40 * 1_769_472


def test_refused_budget_names_the_least_that_works() -> None:
    with pytest.raises(ConfigError, match="set it to ") as refused:
        plan(EngineConfig(memory_budget_bytes=GIB), MODEL, MAC, RULES)
    advised = int(str(refused.value).rsplit("set it to ", 1)[1].split()[0])
    assert plan(EngineConfig(memory_budget_bytes=advised), MODEL, MAC, RULES).capacity == 8
    with pytest.raises(ConfigError):
        plan(EngineConfig(memory_budget_bytes=advised - 8), MODEL, MAC, RULES)


def test_capacity_below_top_k_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(
        ConfigError, match=r"capacity=7 is below top_k=8.*set capacity to 8 or more"
    ):
        plan(EngineConfig(capacity=7), MODEL, MAC, RULES)
    assert plan(EngineConfig(capacity=8), MODEL, MAC, RULES).capacity == 8


def test_capacity_above_the_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capacity=257.*set capacity to 256 or less"):
        plan(EngineConfig(capacity=257), MODEL, MAC, RULES)


def test_capacity_and_budget_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="allows capacity"):
        plan(EngineConfig(capacity=256, memory_budget_bytes=8 * GIB), MODEL, MAC, RULES)


def test_dtype_other_than_the_checkpoints_is_refused_with_the_one_that_works() -> None:
    with pytest.raises(ConfigError, match='use dtype="bfloat16"'):
        plan(EngineConfig(dtype="float32"), MODEL, MAC, RULES)


def test_context_is_bounded_by_the_state_budget() -> None:
    small = plan(EngineConfig(kv_budget_bytes=100 * MIB), MODEL, MAC, RULES)
    assert small.lane_bytes(small.max_context_tokens) <= 100 * MIB
    assert small.lane_bytes(small.max_context_tokens + 1) > 100 * MIB
    large = plan(EngineConfig(), MODEL, replace(MAC, total_memory_bytes=512 * GIB), RULES)
    assert large.max_context_tokens == 262_144
    assert large.is_resident


def test_numerics_is_not_derived_from_the_memory() -> None:
    digests = {
        plan(EngineConfig(capacity=capacity), MODEL, device, RULES).numerics_digest
        for capacity in (8, 128)
        for device in (MAC, replace(MAC, total_memory_bytes=512 * GIB))
    }
    assert digests == {RULES.digest}
