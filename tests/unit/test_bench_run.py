"""The bench on a small random checkpoint, in this process."""

import gc
import json
from io import StringIO

import mlx.core as mx
import pytest
from pydantic import ValidationError
from rich.console import Console

from qwisp.bench import picture
from qwisp.bench.__main__ import finish
from qwisp.bench.progress import ProgressDisplay
from qwisp.bench.prompts import BenchPrompt
from qwisp.bench.report import Report, Spread
from qwisp.bench.run import Run
from qwisp.bench.settings import RunSettings, default_capacities, plan_run, with_capacity
from qwisp.bench.table import print_report
from qwisp.config import EngineConfig
from qwisp.engine.checkpoint import Checkpoint
from qwisp.engine.engine import Engine
from qwisp.errors import ConfigError
from qwisp.kernels.numerics import device_numerics
from tests.synthetic import edit_tensors, make_checkpoint

PROMPTS = (BenchPrompt("long", tuple(range(3, 50))), BenchPrompt("short", (7, 11, 7)))
NUM_EXPERTS, TOP_K = 16, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def settings_for(model, **changes):
    return RunSettings(
        **{"model": model, "prompts": PROMPTS, "max_tokens": 6, "trials": 2} | changes
    )


def run(settings, load=Engine.load, stderr=None):
    with ProgressDisplay(Console(file=stderr or StringIO())) as progress:
        return Run(settings, EngineConfig(), progress, load).execute()


@pytest.fixture(scope="module")
def measured(model):
    """A report, and what was shown on the way to it."""
    stderr = StringIO()
    report = run(settings_for(model, capacities=(16, 11, "auto", 8)), stderr=stderr)
    return report, stderr.getvalue()


@pytest.fixture(scope="module")
def report(measured):
    return measured[0]


def test_every_capacity_is_measured_once_and_is_exact(report):
    assert [result.plan.capacity for result in report.results] == [8, 11, 16]
    assert report.is_exact
    assert [result.exactness.is_reference for result in report.results] == [False, False, True]
    assert [result.exactness.tokens_compared for result in report.results] == [12, 12, 0]
    assert report.reference.is_resident


def test_decode_counters_are_those_of_the_decode_steps_alone(model, report):
    layers = Checkpoint.open(model).expert_layers
    expert_nbytes = layers[0].expert_nbytes
    assert {layer.expert_nbytes for layer in layers} == {expert_nbytes}
    for result in report.results:
        for request in (request for trial in result.trials for request in trial.requests):
            decode, prefill = request.decode, request.prefill
            assert decode.layer_steps == request.generated_tokens * len(layers)
            assert decode.expert_hits + decode.expert_misses == decode.layer_steps * TOP_K
            assert decode.bytes_read == decode.expert_misses * expert_nbytes
            # The last layer of a prefill needs no experts: no logits come from it.
            assert prefill.layer_steps == len(layers) - 1
            assert decode.passes == decode.layer_steps


def test_the_figures_of_a_trial_are_those_of_its_requests(report):
    for result in report.results:
        for trial in result.trials:
            steps = sum(request.generated_tokens for request in trial.requests)
            nbytes = sum(request.decode.bytes_read for request in trial.requests)
            decode_s = sum(request.decode_s for request in trial.requests)
            assert trial.bytes_per_token == nbytes / steps
            assert trial.decode_tok_s == (steps - len(PROMPTS)) / decode_s
            assert 0 <= trial.hit_rate <= 1
            assert 0 <= trial.read_wait_share < 1
        low, high = result.decode_tok_s.low, result.decode_tok_s.high
        assert low <= result.decode_tok_s.median <= high
        assert {low, high} == {trial.decode_tok_s for trial in result.trials}


def test_a_resident_run_reads_nothing_and_a_small_one_reads_and_splits(report):
    small, _, resident = report.results
    assert resident.bytes_per_token.high == 0
    assert resident.hit_rate.low == 1
    assert small.bytes_per_token.low > 0
    assert small.prefill_passes.median == 2
    assert resident.prefill_passes.median == 1


def test_peak_memory_is_of_each_capacity_on_its_own(report):
    """The largest is measured last, so only the smallest could be hiding behind another's peak."""
    peaks = [result.peak_memory_bytes - result.memory_before_bytes for result in report.results]
    arenas = [result.plan.arena_bytes for result in report.results]
    assert peaks[0] < peaks[2]
    assert all(peak > arena for peak, arena in zip(peaks, arenas, strict=True))


def test_a_closed_engine_leaves_no_memory_to_the_next(report):
    before = [result.memory_before_bytes for result in report.results]
    # Arrays that earlier tests left to the garbage collector may go meanwhile.
    assert max(before) - min(before) < 1 << 16


def test_each_trial_is_shown_as_it_ends(measured):
    _, shown = measured
    trials = [line for line in shown.splitlines() if " trial " in line and "tok/s" in line]
    assert len(trials) == 6
    assert trials[0].startswith("C=8 trial 1 of 2: ")


def test_a_report_survives_its_json(report):
    line = report.model_dump_json()
    assert "\n" not in line
    assert Report.model_validate_json(line) == report


@pytest.mark.parametrize("change", [{"schema_version": 2}, {"surprise": 1}])
def test_another_schema_is_refused(report, change):
    with pytest.raises(ValidationError, match=next(iter(change))):
        Report.model_validate_json(json.dumps({**json.loads(report.model_dump_json()), **change}))


def test_equal_runs_give_equal_reference_and_traffic(model, report):
    again = run(settings_for(model, capacities=(8,)))
    assert again.reference == report.reference
    traffic = [
        [request.decode.bytes_read for request in trial.requests]
        for trial in again.results[0].trials
    ]
    assert traffic == [
        [request.decode.bytes_read for request in trial.requests]
        for trial in report.results[0].trials
    ]


def test_one_wrong_weight_of_one_expert_fails_l1_by_name(model, tmp_path, capsys):
    """The planted difference: below full capacity, another checkpoint's expert 3 is loaded."""
    wrong = make_checkpoint(tmp_path / "wrong")

    def spoil(tensors):
        name = next(name for name in tensors if name.endswith("0.mlp.switch_mlp.up_proj.scales"))
        tensors[name][:, 0, 0] *= 1.001

    edit_tensors(wrong, spoil)

    def load(folder, config, on_progress):
        return Engine.load(folder if config.capacity == NUM_EXPERTS else wrong, config, on_progress)

    report = run(settings_for(model, trials=1), load)
    assert [result.exactness.is_exact for result in report.results] == [False, True]
    assert finish(report, None) == 1
    captured = capsys.readouterr()
    assert "L1 fails at C=8, prompt long, token 0: logits bytes differ" in captured.err
    assert "NO" in captured.out
    assert json.loads(captured.out.splitlines()[-1])["is_exact"] is False


def test_other_numerics_fail_l1_even_where_the_bytes_agree(model):
    def load(folder, config, on_progress):
        numerics = device_numerics(dtype="float32", prefill_chunk=64)
        if config.capacity != NUM_EXPERTS:
            config = EngineConfig(**{**dict(config), "numerics": numerics})
        return Engine.load(folder, config, on_progress)

    report = run(settings_for(model, capacities=(8,), trials=1), load)
    assert not report.is_exact
    assert "numerics" in report.results[0].exactness.differences[0].what


def test_without_capacities_shares_of_the_experts_are_measured(model):
    planned = plan_run(settings_for(None), EngineConfig())
    assert [plan.capacity for plan in planned.measured] == [8, 16, 32, 64]
    assert planned.reference.capacity == planned.measured[-1].capacity
    planned = plan_run(settings_for(model), EngineConfig())
    assert [plan.capacity for plan in planned.measured] == [TOP_K, NUM_EXPERTS]


def test_default_capacities_stay_within_the_memory_budget():
    full = plan_run(settings_for(None), EngineConfig()).reference
    slot_bytes = full.arena_bytes // full.capacity
    budget = full.total_bytes - 24 * slot_bytes
    config = EngineConfig(memory_budget_bytes=budget, kv_budget_bytes=full.state_budget_bytes)
    planned = plan_run(settings_for(None), config)
    assert planned.reference.capacity == 40
    assert not planned.reference.is_resident
    assert list(default_capacities(planned.reference)) == [8, 16, 32, 40]


def test_a_capacity_that_cannot_work_is_refused_before_anything_is_loaded(model):
    def load(*args):
        raise AssertionError("loaded")

    with pytest.raises(ConfigError, match="set capacity to 8 or more"):
        run(settings_for(model, capacities=(16, 7)), load)
    with pytest.raises(ConfigError, match="set capacity to 16 or less"):
        run(settings_for(model, capacities=(8, 17)), load)


def test_settings_of_another_capacity_keep_the_rest():
    config = EngineConfig(io_threads=2, read_gbs_limit=0.5)
    assert dict(with_capacity(config, 9)) == {**dict(config), "capacity": 9}


def test_files_hold_the_report_and_a_picture(report, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs the plot extra")
    assert finish(report, tmp_path) == 0
    assert Report.model_validate_json((tmp_path / "bench.json").read_text()) == report
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert Report.model_validate_json(capsys.readouterr().out.splitlines()[-1]) == report


def test_without_matplotlib_one_line_says_how_to_get_it(report, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(picture, "can_draw", lambda: False)
    assert finish(report, tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert capsys.readouterr().err.splitlines() == [f"qwisp.bench: {picture.HOW_TO_GET}"]


def test_the_table_has_a_line_for_each_capacity(report, capsys):
    finish(report, None)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    verdicts = {line[0]: line[-1] for line in lines if line and line[-1] in ("yes", "ref.")}
    assert verdicts == {"8": "yes", "11": "yes", "16": "ref."}


def test_no_array_of_a_run_stays_alive(model):
    gc.collect()
    before = mx.get_active_memory()
    run(settings_for(model, trials=1, max_tokens=2))
    gc.collect()
    assert mx.get_active_memory() == before


def test_the_table_fits_an_80_column_terminal(report):
    """At the widest figures there are, nothing is cut or folded."""
    wide = [
        result.model_copy(
            update={
                "decode_tok_s": Spread(median=999.9, low=888.8, high=1111.1),
                "first_token_s": Spread(median=99.999, low=1.0, high=100.0),
                "bytes_per_token": Spread(median=999.99e6, low=0.0, high=999.99e6),
                "peak_memory_bytes": 99_999_000_000,
            }
        )
        for result in report.results
    ]
    out = StringIO()
    print_report(report.model_copy(update={"results": tuple(wide)}), Console(file=out, width=80))
    assert " 999.9 888.8-1111.1    99999 999.99" in out.getvalue()
    assert "…" not in out.getvalue()
