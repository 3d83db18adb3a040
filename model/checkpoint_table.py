"""Every tensor that a checkpoint of a given ModelConfig must hold: name, stored shape, stored type, scale.

Source: spec model.md sections 7, 8.2 and 8.3. Names are those of the release, without the optional ``model.`` prefix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from .config import ModelConfig, VisionConfig
from .config_checks import GROUP

#: Prefixes of tensors that belong to the vision path; a checkpoint holds all of them or none.
VISION_PREFIXES: Final = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
_PATCH_CHANNELS = 3


class Storage(Enum):
    """How a tensor is stored; the value is its safetensors type. Scales are E8M0 bytes in a partner ``X.scale``."""

    BF16 = "BF16"
    F32 = "F32"
    FP8_BLOCKS = "F8_E4M3"  # a scale per 32 x 32 block
    FP8_ROWS = "F8_E4M3 rows"  # a scale per 1 x 32 group
    FP4_PACKED = "I8"  # two E2M1 a byte, low nibble first; a scale per 1 x 32 group
    SCALE = "F8_E8M0"

    @property
    def dtype(self) -> str:
        """The type as a safetensors header spells it."""
        return self.value.split()[0]


@dataclass(frozen=True)
class TensorSpec:
    """One logical tensor. shape: elements, before packing. A quantised one has a scale partner."""

    shape: tuple[int, ...]
    storage: Storage

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the file: packed tensors hold two elements a byte along the last axis."""
        if self.storage is Storage.FP4_PACKED:
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of the partner ``X.scale``, None for a tensor that is stored as it is."""
        match self.storage:
            case Storage.FP8_BLOCKS:
                return tuple(-(-size // GROUP) for size in self.shape)
            case Storage.FP8_ROWS | Storage.FP4_PACKED:
                return (*self.shape[:-1], self.shape[-1] // GROUP)
            case _:
                return None


def scale_name(name: str) -> str:
    """``X.scale`` of ``X.weight``."""
    return name.removesuffix(".weight") + ".scale"


def language_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name -> TensorSpec of embedding, backbone, head and DSpark blocks (scales not listed: see TensorSpec)."""
    width, vocab = config.hidden_size, config.vocab_size
    table = {
        "embed.weight": _bf16(vocab, width),
        "head.weight": _bf16(vocab, width),
        "norm.weight": _bf16(width),
    }
    for layer in range(config.num_hidden_layers):
        for name, spec in _layer(config, layer):
            table[f"layers.{layer}.{name}"] = spec
    for block in range(config.num_nextn_predict_layers):
        for name, spec in _dspark_block(config, block):
            table[f"mtp.{block}.{name}"] = spec
    return table


def vision_tensors(vision: VisionConfig, width: int) -> dict[str, TensorSpec]:
    """Name -> TensorSpec of vision tower and aligner; `width` is the hidden size of the language model."""
    inner, hidden = vision.hidden_size, vision.intermediate_size
    patch = _PATCH_CHANNELS * vision.patch_size**2
    table = {
        "vision.patch_embed.proj.weight": _bf16(inner, patch),
        "vision.patch_embed.proj.bias": _bf16(inner),
        "vision.norm.weight": _bf16(inner),
        "aligner.w1.weight": _bf16(width, inner * vision.downsample_ratio**2),
        "aligner.w1.bias": _bf16(width),
        "aligner.w2.weight": _bf16(width, width),
        "aligner.w2.bias": _bf16(width),
        "image_start": _bf16(width),
        "image_end": _bf16(width),
        "image_newline": _bf16(width),
    }
    for block in range(vision.num_hidden_layers):
        shapes = {
            "norm1.weight": (inner,),
            "norm2.weight": (inner,),
            "attn.wqkv.weight": (3 * inner, inner),
            "attn.wqkv.bias": (3 * inner,),
            "attn.wo.weight": (inner, inner),
            "attn.wo.bias": (inner,),
            "mlp.w1.weight": (2 * hidden, inner),
            "mlp.w2.weight": (inner, hidden),
        }
        table.update(
            {f"vision.blocks.{block}.{name}": _bf16(*shape) for name, shape in shapes.items()}
        )
    return table


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, TensorSpec]]:
    yield from _block(config, config.n_routed_experts)
    if config.is_kv_source(layer):
        yield from _compressor(config, config.ratio(layer))
    if config.is_index_source(layer):
        yield from _indexer(config, owns_keys=config.is_kv_source(layer))
    if layer in config.engram_layer_ids:
        yield from _engram(
            config, config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        )


def _block(config: ModelConfig, num_experts: int) -> Iterator[tuple[str, TensorSpec]]:
    """What every backbone layer and every DSpark block has."""
    width, head, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    group_in, group_out = heads * head // config.o_groups, config.o_groups * config.o_lora_rank
    yield "attn_norm.weight", _bf16(width)
    yield "ffn_norm.weight", _bf16(width)
    yield "attn.wq_a.weight", _fp8(config.q_lora_rank, width)
    yield "attn.q_norm.weight", _bf16(config.q_lora_rank)
    yield "attn.wq_b.weight", _fp8(heads * head, config.q_lora_rank)
    yield "attn.wkv.weight", _fp8(head, width)
    yield "attn.kv_norm.weight", _bf16(head)
    yield "attn.wo_a.weight", _fp8(group_out, group_in)
    yield "attn.wo_b.weight", _fp8(width, group_out)
    yield "attn.attn_sink", _f32(heads)
    mixes = config.hc_mult * (config.hc_mult + 2)
    for part in ("attn", "ffn"):
        yield f"hc_{part}_fn", _f32(mixes, config.hc_mult * width)
        yield f"hc_{part}_base", _f32(mixes)
        yield f"hc_{part}_scale", _f32(3)
    yield "ffn.gate.weight", _bf16(num_experts, width)
    yield "ffn.gate.bias", _f32(num_experts)
    yield "ffn.gate.bias_vl", _f32(num_experts)
    yield from _swiglu(
        "ffn.shared_experts", width, config.moe_intermediate_size, Storage.FP8_BLOCKS
    )
    for expert in range(num_experts):
        yield from _swiglu(
            f"ffn.experts.{expert}", width, config.moe_intermediate_size, Storage.FP4_PACKED
        )


def _swiglu(
    prefix: str, width: int, inner: int, storage: Storage
) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{prefix}.w1.weight", TensorSpec((inner, width), storage)
    yield f"{prefix}.w3.weight", TensorSpec((inner, width), storage)
    yield f"{prefix}.w2.weight", TensorSpec((width, inner), storage)


def _compressor(config: ModelConfig, ratio: int) -> Iterator[tuple[str, TensorSpec]]:
    yield "attn.compressor.wkv.weight", _bf16(config.head_dim, config.hidden_size)
    if ratio > 1:
        yield "attn.compressor.wgate.weight", _bf16(config.head_dim, config.hidden_size)
    yield "attn.compressor.norm.weight", _bf16(config.head_dim)


def _indexer(config: ModelConfig, *, owns_keys: bool) -> Iterator[tuple[str, TensorSpec]]:
    yield (
        "attn.indexer.wq_b.weight",
        _fp8(config.index_n_heads * config.index_head_dim, config.q_lora_rank),
    )
    yield "attn.indexer.weights_proj.weight", _bf16(config.index_n_heads, config.hidden_size)
    if owns_keys:
        yield "attn.indexer.wk.weight", _bf16(config.index_head_dim, config.head_dim)
        yield "attn.indexer.k_norm.weight", _bf16(config.index_head_dim)


def _engram(config: ModelConfig, rows: int) -> Iterator[tuple[str, TensorSpec]]:
    streams, width = config.hc_mult, config.hidden_size
    yield "engram.embed.weight", TensorSpec((rows, config.engram_head_dim), Storage.FP8_ROWS)
    yield (
        "engram.wkv.weight",
        _fp8((streams + 1) * width, config.engram_columns * config.engram_head_dim),
    )
    yield "engram.q_weight", _bf16(streams, width)
    yield "engram.k_weight", _bf16(streams, width)


def _dspark_block(config: ModelConfig, block: int) -> Iterator[tuple[str, TensorSpec]]:
    width, vocab, rank = config.hidden_size, config.vocab_size, config.dspark_markov_rank
    yield from _block(config, config.dspark_n_routed_experts)
    if block == 0:
        yield "main_proj.weight", _fp8(width, len(config.dspark_target_layer_ids) * width)
        yield "main_norm.weight", _bf16(width)
    if block == config.num_nextn_predict_layers - 1:
        yield "norm.weight", _bf16(width)
        yield "markov_head.embed.weight", _bf16(vocab, rank)
        yield "markov_head.head.weight", _bf16(vocab, rank)
        yield "confidence_head.proj.weight", _bf16(1, width + rank)


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape, Storage.BF16)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, Storage.F32)


def _fp8(*shape: int) -> TensorSpec:
    return TensorSpec(shape, Storage.FP8_BLOCKS)
