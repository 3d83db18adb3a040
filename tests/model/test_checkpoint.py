"""Opening checkpoints: golden ones, faulty ones, and those we wrote ourselves."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.model.checkpoint import Checkpoint, fingerprint
from headrace.model.checkpoint_save import save_checkpoint
from headrace.model.checkpoint_table import language_tensors, vision_tensors
from headrace.model.config import config_from_dict, load_config
from headrace.transfer.errors import CheckpointError

Rewrite = Callable[[Callable[[dict[str, Any]], None]], Path]
WQ_A = "layers.0.attn.wq_a"
EXPERT = "layers.4.ffn.experts.3.w2"


def message_of(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        Checkpoint(directory)
    return str(error.value)


def test_golden_checkpoints_hold_exactly_the_expected_tensors(checkpoint: Checkpoint) -> None:
    assert sum(math.prod(spec.shape) for spec in checkpoint.specs.values()) == 704_192


def test_larger_golden_checkpoint_opens(micro: Path) -> None:
    assert len(Checkpoint(micro).specs) == len(language_tensors(load_config(micro)))


def test_released_table_has_the_published_counts(released: dict[str, Any]) -> None:
    config = config_from_dict(released)
    assert config.vision_config is not None
    language = language_tensors(config)
    vision = vision_tensors(config.vision_config, config.hidden_size)
    scales = sum(spec.scale_shape is not None for spec in language.values())
    assert len(vision) == 266
    assert len(language) + scales + len(vision) == 96_085

    def parameters(*starts: str) -> int:
        return sum(
            math.prod(spec.shape)
            for name, spec in language.items()
            if name.startswith(starts) and ".engram.embed" not in name
        )

    assert parameters("layers.0.") == 13_754_511_990
    assert parameters("layers.") == 550_557_002_864
    assert parameters("embed", "head", "norm") == 1_323_832_320
    assert parameters("mtp.") == 14_225_362_530
    assert language["layers.1.engram.embed.weight"].scale_shape == (384006168, 8)
    assert language["layers.0.attn.wq_b.weight"].scale_shape == (1024, 40)
    assert language["layers.0.ffn.experts.0.w2.weight"].stored_shape == (5120, 1152)


def test_tensors_are_dequantised_as_the_format_says(checkpoint: Checkpoint) -> None:
    raw = checkpoint.raw(f"{WQ_A}.weight")
    assert (raw.dtype, checkpoint.scale(f"{WQ_A}.weight").dtype) == (
        torch.float8_e4m3fn,
        torch.uint8,
    )
    exponent = int(checkpoint.scale(f"{WQ_A}.weight")[0, 1]) - 127
    dequantised = checkpoint.tensor(f"{WQ_A}.weight")
    assert float(dequantised[5, 40]) == float(raw[5, 40]) * 2.0**exponent

    packed = checkpoint.raw(f"{EXPERT}.weight").view(torch.uint8)
    exponent = int(checkpoint.scale(f"{EXPERT}.weight")[7, 0]) - 127
    code = int(packed[7, 4]) >> 4
    value = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * (-1 if code & 8 else 1)
    assert float(checkpoint.tensor(f"{EXPERT}.weight")[7, 9]) == value * 2.0**exponent

    assert checkpoint.raw("embed.weight").dtype == torch.bfloat16
    assert checkpoint.tensor("embed.weight").dtype == torch.float32
    assert checkpoint.tensor("embed.weight", torch.bfloat16).equal(checkpoint.raw("embed.weight"))


def test_a_name_it_does_not_hold(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor layers\.99"):
        checkpoint.raw("layers.99.attn.wkv.weight")


def test_truncated_shard(copy_of_spec_micro: Path) -> None:
    path = copy_of_spec_micro / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "model.safetensors: truncated" in message_of(copy_of_spec_micro)


def test_empty_shard(copy_of_spec_micro: Path) -> None:
    (copy_of_spec_micro / "model.safetensors").write_bytes(b"")
    assert "model.safetensors: truncated" in message_of(copy_of_spec_micro)


def test_missing_shard(copy_of_spec_micro: Path) -> None:
    (copy_of_spec_micro / "model.safetensors").unlink()
    assert "model.safetensors: file is missing" in message_of(copy_of_spec_micro)


def test_missing_tensor_and_scale(rewrite: Rewrite) -> None:
    def change(tensors: dict[str, Any]) -> None:
        del tensors["norm.weight"], tensors[f"{WQ_A}.scale"]

    message = message_of(rewrite(change))
    assert "2 tensors" in message
    assert "norm.weight is missing: expected BF16 [64]" in message
    assert (
        f"{WQ_A}.scale is missing, the scale of {WQ_A}.weight: expected F8_E8M0 [1, 2]" in message
    )


def test_renamed_tensor(rewrite: Rewrite) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["layers.2.attn.compressor.norm.weight"] = tensors.pop(
            "layers.1.attn.compressor.norm.weight"
        )

    message = message_of(rewrite(change))
    assert "layers.1.attn.compressor.norm.weight is missing" in message
    assert "layers.2.attn.compressor.norm.weight does not belong" in message


def test_misshapen_tensor(rewrite: Rewrite) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["norm.weight"] = tensors["norm.weight"][:32].clone()

    assert "model.safetensors: norm.weight is BF16 [32], expected BF16 [64]" in message_of(
        rewrite(change)
    )


def test_mistyped_tensor(rewrite: Rewrite) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["norm.weight"] = tensors["norm.weight"].float()

    assert "norm.weight is F32 [64], expected BF16 [64]" in message_of(rewrite(change))


def test_a_long_list_of_problems_is_cut(rewrite: Rewrite) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            del tensors[name]

    message = message_of(rewrite(change))
    assert message.count("\n") == 13
    assert "more" in message


def test_model_prefix_is_accepted(rewrite: Rewrite, checkpoint: Checkpoint) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    prefixed = Checkpoint(rewrite(change))
    assert prefixed.raw("norm.weight").equal(checkpoint.raw("norm.weight"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "weight_map"),
        ("[]", "weight_map"),
        ('{"weight_map": 3}', "weight_map"),
        ('{"weight_map": {"norm.weight": "../x.safetensors"}}', "../x.safetensors"),
        ('{"weight_map": {"norm.weight": "weights.bin"}}', "weights.bin"),
        ('{"weight_map": {"norm.weight": "model.safetensors"}}', "should be in None"),
    ],
)
def test_bad_index(copy_of_spec_micro: Path, content: str, words: str) -> None:
    (copy_of_spec_micro / "model.safetensors.index.json").write_text(content)
    message = message_of(copy_of_spec_micro)
    assert "model.safetensors.index.json: " in message
    assert words in message


def test_pickled_weights_are_refused(copy_of_spec_micro: Path) -> None:
    (copy_of_spec_micro / "model.safetensors").rename(copy_of_spec_micro / "pytorch_model.bin")
    (copy_of_spec_micro / "model.safetensors.index.json").unlink()
    assert "pytorch_model.bin) are never loaded" in message_of(copy_of_spec_micro)


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: checkpoint.tensor(name) for name in checkpoint.specs}


def test_saving_and_opening_again_keeps_every_value(
    checkpoint: Checkpoint, document: dict[str, Any], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "a", document, weights_of(checkpoint), max_shard_bytes=200_000)
    again = Checkpoint(tmp_path / "a")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    for name in checkpoint.specs:
        assert again.tensor(name).equal(checkpoint.tensor(name)), name
    save_checkpoint(tmp_path / "b", document, weights_of(again))
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    assert not list(tmp_path.glob("*/*.partial"))


def test_saving_refuses_what_does_not_fit(
    checkpoint: Checkpoint, document: dict[str, Any], tmp_path: Path
) -> None:
    weights = weights_of(checkpoint)
    norm = weights.pop("norm.weight")
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing"):
        save_checkpoint(tmp_path, document, weights)
    with pytest.raises(CheckpointError, match=r"extra does not belong"):
        save_checkpoint(tmp_path, document, weights | {"norm.weight": norm, "extra": norm})
    with pytest.raises(CheckpointError, match=r"norm\.weight is \[32\], expected \[64\]"):
        save_checkpoint(tmp_path, document, weights | {"norm.weight": norm[:32]})
    assert not list(tmp_path.iterdir())
    save_checkpoint(tmp_path, document, weights | {"norm.weight": norm})
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        save_checkpoint(tmp_path, document, weights | {"norm.weight": norm})


def test_fingerprint_follows_content(copy_of_spec_micro: Path, spec_micro: Path) -> None:
    assert fingerprint(copy_of_spec_micro) == fingerprint(spec_micro)
    path = copy_of_spec_micro / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fingerprint(copy_of_spec_micro) != fingerprint(spec_micro)


def test_fingerprint_covers_the_configuration(copy_of_spec_micro: Path, spec_micro: Path) -> None:
    path = copy_of_spec_micro / "config.json"
    document = json.loads(path.read_text())
    document["text_config"]["swiglu_limit"] = 7.0
    path.write_text(json.dumps(document))
    assert fingerprint(copy_of_spec_micro) != fingerprint(spec_micro)
