"""The random checkpoints are what other tests take them for: mlx-lm's models, with live routing."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from tests.synthetic import FAMILIES, make_big_checkpoint, make_checkpoint
from tests.synthetic_tensors import MIXED
from tests.tree import ROOT

PROMPT = np.random.default_rng(0).integers(0, 512, (1, 48))


def routes(model):
    """Record every router's scores while `model` runs."""
    recorded = []
    for layer in model.layers:
        gate = layer.mlp.gate

        class Recorder:
            def __init__(self, gate):
                self.gate = gate

            def __call__(self, x):
                scores = self.gate(x)
                recorded.append(np.array(scores.astype(mx.float32))[0])
                return scores

        layer.mlp.gate = Recorder(gate)
    return recorded


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("mixed_bits", [False, True], ids=["4 bits", "mixed bits"])
def test_mlx_lm_loads_it_and_its_activations_are_sane(family, tied, shards, mixed_bits, tmp_path):
    make_checkpoint(
        tmp_path,
        family,
        tied=tied,
        shards=shards,
        mixed_bits=mixed_bits,
        with_extra_tensors=family == "qwen3_5_moe",
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    model, config = load_model(tmp_path)
    recorded = routes(model)
    logits = np.array(model(mx.array(PROMPT)))[0]
    assert 1.0 < logits.std() < 4.0
    for scores in recorded:
        top = np.argsort(scores, axis=-1)[:, -8:]
        assert len(np.unique(top)) == 16, "every expert has its tokens"
        assert len({tuple(sorted(row)) for row in top}) > 20, "tokens differ in their experts"
        margin = np.sort(scores, axis=-1)
        assert np.median(margin[:, -8] - margin[:, -9]) > 0.02
    if mixed_bits:
        found = {
            (q["bits"], q["group_size"]) for q in config["quantization"].values() if type(q) is dict
        }
        assert found == set(MIXED) - {(4, 64)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mlx_lm_loads_other_types_and_dense_weights(dtype, tmp_path):
    make_checkpoint(tmp_path, dtype=dtype, quantize_resident=False)
    model, _ = load_model(tmp_path)
    assert model.language_model.lm_head.weight.dtype == getattr(mx, dtype)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_mlx_lm_agrees_on_dense_layers(family, tmp_path):
    make_checkpoint(tmp_path, family, layers=4, dense_layers=(0, 3))
    model, _ = load_model(tmp_path)
    assert [hasattr(layer.mlp, "gate") for layer in model.layers] == [False, True, True, False]


def test_equal_arguments_give_equal_files(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_checkpoint(tmp_path / name, seed=seed)
    a, b, c = (mx.load(str(tmp_path / n / "model.safetensors")) for n in "abc")
    assert all(mx.array_equal(a[name], b[name]) for name in a)
    assert not mx.array_equal(
        a["language_model.lm_head.weight"], c["language_model.lm_head.weight"]
    )


def test_a_tokenizer_can_come_along(tmp_path):
    embedded = ROOT / "qwisp" / "models" / "tiny"
    make_checkpoint(tmp_path, vocab=8192, tokenizer_from=embedded)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (embedded / name).read_bytes()


def test_the_big_one_is_big_in_experts_only_and_runs(tmp_path):
    make_big_checkpoint(tmp_path, min_expert_nbytes=40_000_000)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert sizes["model-00002-of-00002.safetensors"] > 40_000_000
    assert sizes["model-00001-of-00002.safetensors"] < 4_000_000
    model, _ = load_model(tmp_path)
    logits = np.array(model(mx.array(PROMPT[:, :4])))
    assert 1.0 < logits.std() < 4.0
