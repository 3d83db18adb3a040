"""What config.json may say, and the one error that anything else gets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.model.config import ModelConfig, config_from_dict, load_config
from headrace.transfer.errors import CheckpointError


def test_released_configuration_has_the_roles_of_the_specification(
    released: dict[str, Any],
) -> None:
    config = config_from_dict(released)
    assert config.split_layer == 20
    assert [config.kv_source(layer) for layer in (0, 1, 2, 7, 8, 19, 20, 39)] == [
        None,
        None,
        2,
        2,
        8,
        14,
        20,
        20,
    ]
    assert [config.index_source(layer) for layer in (1, 13, 20, 23, 24, 39)] == [
        None,
        8,
        20,
        20,
        24,
        36,
    ]
    assert config.is_kv_source(14)
    assert not config.is_kv_source(24)
    assert config.is_index_source(24)
    assert (config.engram_columns, config.engram_hash_vocab) == (24, 99092)
    assert config.vision_config is not None
    assert config.vision_config.max_wh_ratio is None


def test_golden_configuration_is_read_from_its_directory(spec_micro: Path) -> None:
    config = load_config(spec_micro)
    assert (config.hidden_size, config.split_layer, config.gate_temp) == (64, 3, 1.0)
    assert config.compress_ratios == (0, 2, 2, 1, 1, 1, 0)
    assert isinstance(config.rope_theta, float)
    assert config.vision_config is None


Change = Callable[[dict[str, Any]], None]


def put(**values: Any) -> Change:
    return lambda text: text.update(values)


def drop(key: str) -> Change:
    return lambda text: text.pop(key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(attention_sinks=True), ["unknown key", "text_config.attention_sinks"]),
        (drop("head_dim"), ["text_config.head_dim is missing"]),
        (put(head_dim="32"), ["head_dim", "'32'", "an integer"]),
        (put(head_dim=True), ["head_dim", "True", "an integer"]),
        (put(head_dim=48), ["head_dim", "48", "multiple of 32"]),
        (put(rms_norm_eps=0), ["rms_norm_eps", "greater than 0"]),
        (put(hidden_act="gelu"), ["hidden_act", "'gelu'", "'silu'"]),
        (drop("scoring_func"), ["scoring_func is missing"]),
        (put(q_head_norm=True), ["q_head_norm", "only False"]),
        (put(index_k_source_layer_ids=[1]), ["index_k_source_layer_ids", "[1, 3]"]),
        (put(o_groups=3), ["o_groups", "num_attention_heads 2"]),
        (put(qk_rope_head_dim=15), ["qk_rope_head_dim", "even"]),
        (put(compress_ratios=[0, 2, 2, 1, 1, 1]), ["compress_ratios", "7 entries"]),
        (put(compress_ratios=[0, 2, 2, 1, 1, 1, 1]), ["compress_ratios", "DSpark"]),
        (put(compress_ratios=[0, 2, 2, 1, 4, 1, 0]), ["compress_ratios", "made of 0, 1 and 2"]),
        (put(compress_ratios=[0, 2, 2, 1, 0, 1, 0]), ["compress_ratios", "from layer 3"]),
        (put(compress_ratios=[0, 2, 2, 1, "1", 1, 0]), ["compress_ratios[4]", "an integer"]),
        (put(kv_source_layer_ids=[0, 3]), ["kv_source_layer_ids", "layer 0 has 0"]),
        (put(kv_source_layer_ids=[2, 3]), ["kv_source_layer_ids", "one at or before 1"]),
        (put(kv_source_layer_ids=[1]), ["kv_source_layer_ids", "layer 3", "own ratio"]),
        (put(kv_source_layer_ids=[3, 1]), ["kv_source_layer_ids", "ascending"]),
        (put(index_source_layer_ids=[1, 5]), ["index_source_layer_ids", "from 3 to 3"]),
        (put(candidate_source_layer_id=1), ["candidate_source_layer_id", "the last KV source, 3"]),
        (put(candidate_topk_blocks=2), ["candidate_topk_blocks", "8", "at least", "11"]),
        (put(num_experts_per_tok=9), ["num_experts_per_tok", "at most n_routed_experts 8"]),
        (put(n_shared_experts=2), ["n_shared_experts", "it must be 1"]),
        (put(engram_layer_ids=[3]), ["engram_layer_ids", "from 0 to 2"]),
        (put(engram_num_embeddings=[557]), ["engram_num_embeddings", "[557]", "[556]"]),
        (put(engram_num_embeddings=[]), ["engram_num_embeddings", "as long as"]),
        (put(engram_pad_token_id=512), ["engram_pad_token_id", "below vocab_size 512"]),
        (put(dspark_target_layer_ids=[2]), ["dspark_target_layer_ids", "from 3 to 5"]),
        (put(dspark_noise_token_id=-1), ["dspark_noise_token_id", "-1"]),
        (put(rope_scaling=None), ["text_config.rope_scaling", "an object"]),
    ],
)
def test_text_config_that_cannot_be_served(
    document: dict[str, Any], change: Change, words: list[str]
) -> None:
    change(document["text_config"])
    with pytest.raises(CheckpointError) as error:
        config_from_dict(document)
    for word in ["config.json: ", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(architectures=["LlamaForCausalLM"]), ["architectures", "DeepseekV41ForCausalLM"]),
        (put(sparse=1), ["unknown key sparse"]),
        (put(vision_config={"model_type": "deepseek_v41_vision"}), ["vision_config"]),
        (put(tokenizer_compatibility="native"), ["tokenizer_compatibility", "release"]),
        (drop("bos_token_id"), ["bos_token_id is missing"]),
        (drop("text_config"), ["text_config", "an object"]),
        (drop("quantization_config"), ["quantization_config", "an object"]),
        (put(dtype="float16"), ["dtype", "'float16'", "'bfloat16'"]),
    ],
)
def test_top_level_that_cannot_be_served(
    document: dict[str, Any], change: Change, words: list[str]
) -> None:
    change(document)
    with pytest.raises(CheckpointError) as error:
        config_from_dict(document)
    for word in words:
        assert word in str(error.value)


def test_unknown_quantization_key_and_value_are_named(document: dict[str, Any]) -> None:
    document["quantization_config"]["expert_dtype"] = "fp8"
    with pytest.raises(CheckpointError, match=r"quantization_config\.expert_dtype is 'fp8'"):
        config_from_dict(document)
    document["quantization_config"] |= {"expert_dtype": "fp4", "group": 3}
    with pytest.raises(CheckpointError, match=r"unknown key quantization_config\.group"):
        config_from_dict(document)


def test_optional_keys_with_their_defaults_are_accepted(document: dict[str, Any]) -> None:
    document["transformers_version"] = "5.0"
    document["text_config"] |= {
        "hc_shifted": True,
        "index_k_source_layer_ids": [1, 3],
        "gate_temp": 2,
    }
    config = config_from_dict(document)
    assert isinstance(config, ModelConfig)
    assert config.gate_temp == 2.0


def test_a_null_compressed_vocabulary_hashes_the_ids_themselves(document: dict[str, Any]) -> None:
    document["text_config"]["engram_compressed_vocab_size"] = None
    assert config_from_dict(document).engram_hash_vocab == 512


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not valid JSON"), ("[]", "expected a JSON object")]
)
def test_unreadable_file(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(CheckpointError, match="is this a model directory"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        load_config(tmp_path)


def test_a_configuration_survives_json(released: dict[str, Any]) -> None:
    assert config_from_dict(json.loads(json.dumps(released))) == config_from_dict(released)
