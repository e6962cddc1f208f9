"""config.json becomes a `ModelSpec`, or is refused with field, value and what is allowed."""

import copy
import json
from pathlib import Path

import pytest

from qwisp.engine.layout import canonical_name, is_skipped
from qwisp.engine.model_config import parse_model_config, read_model_config
from qwisp.errors import CheckpointError
from qwisp.kernels.weights import Quantization
from tests.tree import ROOT

PATH = Path("config.json")
EMBEDDED = ROOT / "qwisp" / "models" / "tiny" / "config.json"

DENSE_FIELDS = {
    "hidden_size": 2048,
    "vocab_size": 151936,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
HYBRID_FIELDS = {
    **DENSE_FIELDS,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 512,
}
QWEN3_MOE = {"model_type": "qwen3_moe", **DENSE_FIELDS, "rope_theta": 1000000}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    **HYBRID_FIELDS,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
}
QWEN3_5_MOE = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        **HYBRID_FIELDS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {"depth": 27},
}
AFFINE = {"group_size": 64, "bits": 4, "mode": "affine"}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def in_text(**changes):
    config = copy.deepcopy(QWEN3_5_MOE)
    config["text_config"] |= changes
    return config


def parse(config):
    return parse_model_config(json.dumps(config).encode(), PATH)


def spec_of(config):
    return parse(config).spec


def refusal(config):
    with pytest.raises(CheckpointError) as refused:
        parse(config).quantization_of("model.layers.0.mlp.gate")
    assert str(refused.value).startswith("config.json: ")
    return str(refused.value).removeprefix("config.json: ")


def test_the_embedded_model_is_described():
    config = read_model_config(EMBEDDED)
    spec = config.spec
    assert (spec.model_type, spec.hidden_size, spec.vocab_size) == ("qwen3_5_moe", 256, 8192)
    assert [layer.mixer for layer in spec.layers] == ["gdn", "gdn", "gdn", "attention"] * 2
    assert spec.moe_layers == tuple(range(8))
    assert spec.attention.has_output_gate
    assert (spec.attention.rotary_dims, spec.attention.rope_theta) == (16, 100000.0)
    assert spec.gdn is not None
    assert spec.gdn.conv_channels == 2 * 256 + 512
    assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.norm_topk_prob) == (64, 8, True)
    assert spec.eos_token_ids == (0, 2)
    assert config.quantization_of("lm_head") == Quantization(bits=4, group_size=64)
    assert config.quantization_of("layers.3.mlp.gate") == Quantization(bits=8, group_size=64)


def test_qwen3_5_moe_reads_alike_flat_and_nested():
    flat = {**QWEN3_5_MOE["text_config"], "model_type": "qwen3_5_moe"}
    flat_text = QWEN3_5_MOE["text_config"]
    assert spec_of(flat) == spec_of(QWEN3_5_MOE) == spec_of(flat_text)


def test_qwen3_next_is_a_hybrid():
    spec = spec_of(QWEN3_NEXT)
    assert [layer.mixer for layer in spec.layers] == ["gdn", "gdn", "gdn", "attention"]
    assert spec.gdn is not None
    assert spec.attention.has_output_gate
    assert spec.attention.rotary_dims == 64
    assert spec.moe.shared_intermediate_size == 512


def test_qwen3_moe_has_no_gdn_no_shared_expert_no_gate_and_rotates_whole_heads():
    spec = spec_of({**QWEN3_MOE, "shared_expert_intermediate_size": 512})
    assert [layer.mixer for layer in spec.layers] == ["attention"] * 4
    assert spec.gdn is None
    assert not spec.attention.has_output_gate
    assert spec.attention.rotary_dims == 256
    assert spec.moe.shared_intermediate_size == 0


@pytest.mark.parametrize("config", [QWEN3_NEXT, QWEN3_MOE], ids=["qwen3_next", "qwen3_moe"])
def test_dense_layers_are_those_named_and_those_between_sparse_steps(config):
    config = {**config, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = spec_of(config)
    assert [layer.feed_forward for layer in spec.layers] == ["dense", "moe", "dense", "dense"]
    assert spec.moe_layers == (1,)
    assert parse(config).dense_intermediate_size == 5120


def test_layer_types_outrank_the_attention_interval():
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    spec = spec_of({**QWEN3_NEXT, "layer_types": types})
    assert [layer.mixer for layer in spec.layers] == ["attention", "gdn", "gdn", "attention"]


def test_head_dim_defaults_to_a_share_of_the_hidden_size():
    assert spec_of(without(QWEN3_MOE, "head_dim")).attention.head_dim == 2048 // 16
    assert spec_of({**QWEN3_MOE, "head_dim": None}).attention.head_dim == 2048 // 16


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_rotary_settings_may_be_flat_or_nested(type_key):
    nested = {type_key: "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    config = without(QWEN3_NEXT, "rope_theta", "partial_rotary_factor")
    assert spec_of({**config, "rope_parameters": nested}) == spec_of(QWEN3_NEXT)


def test_a_hybrid_rotates_a_quarter_of_a_head_by_default():
    assert spec_of(without(QWEN3_NEXT, "partial_rotary_factor")).attention.rotary_dims == 64


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(None, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
def test_the_text_config_decides_on_tied_embeddings(outer, inner, tied):
    config = in_text(tie_word_embeddings=inner)
    assert spec_of({**config, "tie_word_embeddings": outer}).tie_word_embeddings is tied


def test_end_of_sequence_ids_are_joined():
    config = {**in_text(eos_token_id=7), "eos_token_id": [3, 5]}
    assert spec_of(config).eos_token_ids == (3, 5, 7)
    assert spec_of(QWEN3_MOE).eos_token_ids == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN3_MOE, "model_type": "llama"}, "model_type='llama' is not supported; supported: "),
        (without(QWEN3_MOE, "model_type"), "model_type: Field required"),
        ({**QWEN3_5_MOE, "text_config": 3}, "text_config: Input should be a valid dictionary"),
        (without(QWEN3_MOE, "hidden_size"), "hidden_size: Field required"),
        (
            in_text(hidden_size="2048"),
            "text_config.hidden_size='2048': Input should be a valid int",
        ),
        ({**QWEN3_MOE, "hidden_size": 0}, "hidden_size=0: Input should be greater than or equal"),
        ({**QWEN3_MOE, "hidden_act": "gelu"}, "hidden_act='gelu': Input should be 'silu'"),
        (in_text(attention_bias=True), "text_config.attention_bias=True: Input should be False"),
        (in_text(attn_output_gate=False), "text_config.attn_output_gate=False: Input should be Tr"),
        ({**QWEN3_MOE, "use_sliding_window": True}, "use_sliding_window=True: Input should be Fal"),
        (
            in_text(rope_parameters={"rope_type": "yarn", "rope_theta": 1e7}),
            "text_config.rope_parameters.rope_type='yarn': Input should be 'default'",
        ),
        (
            {**QWEN3_MOE, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.type='linear': Input should be 'default'",
        ),
        (without(QWEN3_MOE, "rope_theta"), "rope_theta is missing"),
        (
            {**QWEN3_MOE, "rope_parameters": {"rope_theta": 10000.0}},
            "rope_theta=1000000.0 but rope_parameters.rope_theta=10000.0: they must be equal",
        ),
        ({**QWEN3_MOE, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: this family"),
        ({**QWEN3_NEXT, "partial_rotary_factor": 0.001}, "of head_dim=256 rotates 0 dims"),
        ({**QWEN3_NEXT, "partial_rotary_factor": 0.02}, "of head_dim=256 rotates 5 dims"),
        ({**QWEN3_MOE, "num_key_value_heads": 3}, "num_attention_heads=16 must be a multiple of"),
        ({**QWEN3_MOE, "num_experts": 9}, "num_experts_per_tok=10 is above num_experts=9"),
        ({**QWEN3_NEXT, "linear_num_value_heads": 24}, "linear_num_value_heads=24 must be a mult"),
        (without(QWEN3_NEXT, "linear_key_head_dim"), "linear_key_head_dim is missing"),
        (without(QWEN3_NEXT, "norm_topk_prob"), "norm_topk_prob is missing"),
        (
            without(QWEN3_NEXT, "shared_expert_intermediate_size"),
            "shared_expert_intermediate_size is missing",
        ),
        ({**QWEN3_NEXT, "layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hi"),
        ({**QWEN3_NEXT, "layer_types": ["x"] * 4}, "layer_types.0='x': Input should be 'linear_at"),
        (
            {**QWEN3_MOE, "layer_types": ["linear_attention"] * 4},
            "layer_types: this family has full_attention layers only",
        ),
        (in_text(mlp_only_layers=[0]), "text_config.mlp_only_layers=[0] and decoder_sparse_step=1"),
        ({**QWEN3_MOE, "mlp_only_layers": [0, 1, 2, 3]}, "leave no layer with experts"),
        (
            without({**QWEN3_MOE, "mlp_only_layers": [0]}, "intermediate_size"),
            "intermediate_size is missing",
        ),
        (
            without({**QWEN3_MOE, "num_attention_heads": 14}, "head_dim"),
            "head_dim is missing, and hidden_size / num_attention_heads is not whole",
        ),
        ({**QWEN3_MOE, "quantization": 4}, "quantization=4: must be an object"),
        (
            {**QWEN3_MOE, "quantization": {**AFFINE, "mode": "mxfp4"}},
            "quantization: mode='mxfp4' is not supported; supported: 'affine'",
        ),
        (
            {**QWEN3_MOE, "quantization": {**AFFINE, "bits": 3}},
            "quantization: bits=3 is not supported; supported: 4, 8",
        ),
        (
            {**QWEN3_MOE, "quantization": {"bits": 4}},
            "quantization: group_size=None is not supported; supported: 32, 64, 128",
        ),
        (
            {**QWEN3_MOE, "quantization": {**AFFINE, "layers.0.mlp.gate": {"bits": 6}}},
            "quantization.layers.0.mlp.gate: bits=6 is not supported",
        ),
        (
            {
                **QWEN3_MOE,
                "quantization": {
                    **AFFINE,
                    "layers.0.mlp.gate": {"bits": 8},
                    "model.layers.0.mlp.gate": False,
                },
            },
            "quantization: two entries for 'layers.0.mlp.gate' disagree",
        ),
        (
            {**QWEN3_MOE, "quantization_config": {"quant_method": "fp8"}},
            "quantization_config.quant_method='fp8' is not supported; supported: MLX affine",
        ),
        (
            in_text(quantization_config={"quant_method": "gptq"}),
            "quantization_config.quant_method='gptq' is not supported",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(config, message):
    assert message in refusal(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "a list, not a JSON object"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model_type": "a", "model_type": "b"}', "key 'model_type' appears twice"),
        (b" " * ((16 << 20) + 1), "longer than the limit"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        read_model_config(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)


PREFIXES = ["", "model.", "language_model.model.", "model.language_model."]


@pytest.mark.parametrize("written", PREFIXES)
@pytest.mark.parametrize("asked", PREFIXES)
def test_a_module_is_found_whatever_prefix_its_entry_carries(written, asked):
    block = {**AFFINE, f"{written}layers.0.mlp.gate": {"group_size": 32, "bits": 8}}
    config = parse({**QWEN3_MOE, "quantization": block})
    assert config.quantization_of(f"{asked}layers.0.mlp.gate") == Quantization(8, 32)
    assert config.quantization_of(f"{asked}layers.1.mlp.gate") == Quantization(4, 64)


def test_a_module_may_be_declared_unquantized_or_default():
    block = {**AFFINE, "model.layers.0.mlp.gate": False, "model.layers.1.mlp.gate": True}
    config = parse({**QWEN3_MOE, "quantization": block})
    assert config.quantization_of("model.layers.0.mlp.gate") is None
    assert config.quantization_of("model.layers.1.mlp.gate") == Quantization(4, 64)


def test_what_an_entry_leaves_out_is_mlx_default_not_the_block_default():
    block = {"group_size": 32, "bits": 8, "layers.0.mlp.gate": {}, "layers.1.mlp.gate": {"bits": 8}}
    config = parse({**QWEN3_MOE, "quantization": block})
    assert config.quantization_of("layers.0.mlp.gate") == Quantization(4, 64)
    assert config.quantization_of("layers.1.mlp.gate") == Quantization(8, 64)


def test_without_a_quantization_block_nothing_is_declared():
    assert parse(QWEN3_MOE).quantization_of("layers.0.mlp.gate") is None


def test_a_quantization_that_only_unused_modules_have_is_no_fault():
    block = {**AFFINE, "vision_tower.blocks.0": {"bits": 6, "group_size": 64}}
    assert parse({**QWEN3_MOE, "quantization": block}).spec == spec_of(QWEN3_MOE)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("language_model.model.layers.0.mlp.gate", "layers.0.mlp.gate"),
        ("model.language_model.embed_tokens", "embed_tokens"),
        ("model.norm.weight", "norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_lose_their_prefix(name, canonical):
    assert canonical_name(name) == canonical


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("vision_tower.blocks.0.attn.qkv.weight", True),
        ("model.visual.patch_embed.proj.weight", True),
        ("mtp.fc.weight", True),
        ("language_model.mtp.layers.0.mlp.gate.weight", True),
        ("model.layers.0.mlp.gate.weight", False),
    ],
)
def test_vision_and_draft_tensors_are_skipped(name, skipped):
    assert is_skipped(name) is skipped
