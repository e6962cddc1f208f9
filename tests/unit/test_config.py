"""What settings refuse, and in which words."""

import re
from pathlib import Path

import pytest

from qwisp.config import EngineConfig, SamplingParams
from qwisp.errors import ConfigError

COUNT_OR_AUTO = 'a whole number from 1 on, or "auto"'
REFUSED = [
    (SamplingParams, "temperature", (-0.1, 100.5, float("nan"), "1"), "a number from 0 to 100"),
    (SamplingParams, "top_p", (0.0, 1.1, None), "a number above 0 and up to 1"),
    (SamplingParams, "top_k", (-1, 1.5, True), "a whole number from 0 on"),
    (SamplingParams, "min_p", (-0.1, 1.1, "0.5"), "a number from 0 to 1"),
    (SamplingParams, "seed", (-1, 2**64, 1.0), "a whole number from 0 to 2**64 - 1"),
    (EngineConfig, "capacity", (0, 8.5, "foo", None), COUNT_OR_AUTO),
    (EngineConfig, "memory_budget_bytes", (0, "8GB"), COUNT_OR_AUTO),
    (EngineConfig, "kv_budget_bytes", (-1, "Auto"), COUNT_OR_AUTO),
    (EngineConfig, "prefill_chunk", (0, "auto"), "a whole number from 1 on"),
    (EngineConfig, "io_threads", (0, 65, "4"), "a whole number from 1 to 64"),
    (
        EngineConfig,
        "read_gbs_limit",
        (0.0, float("inf"), "fast"),
        "a number above 0, or None for no limit",
    ),
    (EngineConfig, "dtype", ("f32", None), '"auto", "float32", "float16" or "bfloat16"'),
    (EngineConfig, "record_logits", (1, "yes"), "True or False"),
    (EngineConfig, "record_routes", (3, True), "a path, or None for no trace"),
]
UNCHECKED = {"numerics"}
"""What it has to be is defined above `config`, so it is not judged there."""


def refusal(settings, **values) -> str:
    with pytest.raises(ConfigError) as refused:
        settings(**values)
    return str(refused.value)


@pytest.mark.parametrize(
    ("settings", "name", "value", "allowed"),
    [
        (settings, name, value, allowed)
        for settings, name, values, allowed in REFUSED
        for value in values
    ],
)
def test_a_bad_value_is_one_message_with_name_value_and_what_is_allowed(
    settings, name, value, allowed
):
    assert refusal(settings, **{name: value}) == f"{name}={value!r}: give {allowed}"


@pytest.mark.parametrize("settings", [SamplingParams, EngineConfig])
def test_every_setting_is_refused_above(settings):
    named = {name for owner, name, _, _ in REFUSED if owner is settings}
    assert named == set(settings.model_fields) - UNCHECKED


def test_every_bad_setting_is_named_in_the_order_given():
    message = refusal(EngineConfig, capacity="foo", io_threads=0, speed=9)
    assert re.findall(r"(?:^|; )(\w+)(?:=| is not)", message) == ["capacity", "io_threads", "speed"]


@pytest.mark.parametrize(
    ("settings", "name", "close"),
    [
        (EngineConfig, "capactiy", "capacity"),
        (EngineConfig, "memory_budget", "memory_budget_bytes"),
        (EngineConfig, "io_thread", "io_threads"),
        (SamplingParams, "temprature", "temperature"),
        (SamplingParams, "topk", "top_k"),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest_one(settings, name, close):
    assert refusal(settings, **{name: 1}) == (
        f"{name} is not a setting of {settings.__name__}; did you mean {close}?"
    )


def test_a_name_like_no_other_is_answered_with_all_of_them():
    assert refusal(SamplingParams, beams=4) == (
        "beams is not a setting of SamplingParams; it has: temperature, top_p, top_k, min_p, seed"
    )


def test_settings_that_contradict_each_other_are_one_sentence():
    assert refusal(EngineConfig, memory_budget_bytes=5, kv_budget_bytes=9) == (
        "kv_budget_bytes=9 is above memory_budget_bytes=5, of which it is part; set it to 5 or less"
    )


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("QWISP_CAPACITY", "most", f"capacity='most': give {COUNT_OR_AUTO}"),
        ("QWISP_MEMORY_BUDGET_BYTES", "0", f"memory_budget_bytes=0: give {COUNT_OR_AUTO}"),
        ("QWISP_IO_THREADS", "65", "io_threads=65: give a whole number from 1 to 64"),
        (
            "QWISP_READ_GBS_LIMIT",
            "fast",
            "read_gbs_limit='fast': give a number above 0, or None for no limit",
        ),
    ],
)
def test_a_bad_value_from_the_environment_names_its_variable(variable, text, message):
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_env({variable: text})
    assert str(refused.value) == f"environment variable {variable}: {message}"


def test_values_at_the_limits_are_taken():
    SamplingParams(temperature=100, top_p=1, top_k=0, min_p=1.0, seed=2**64 - 1)
    EngineConfig(capacity=1, memory_budget_bytes=2, kv_budget_bytes=2, io_threads=64)
    assert EngineConfig(record_routes="trace").record_routes == Path("trace")
