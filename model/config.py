"""The architecture of a model, as its ``config.json`` states it.

Field names are the keys of the file; a reader who knows the released configuration knows this class. What the network
asks again and again (where the split is, whose KV a layer reads) is derived here once.

Source: spec model.md sections 0.4, 1.2 and 12.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..transfer.errors import CheckpointError
from .config_checks import check_config
from .config_parse import parse_fields, split_document


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN without mscale; used by every rotary embedding inside layers of ratio 1 or 2."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Vision tower and aligner. ``patch_size`` in pixels, ``min_pixels`` in pixels of area."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model. All widths are in elements, all lengths in tokens; layer ids count from 0.

    ``compress_ratios`` has one entry per backbone layer and one per DSpark block: 0 means window only, 2 encoder,
    1 decoder. ``engram_compressed_vocab_size`` is None when token ids are hashed as they are.
    """

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    max_position_embeddings: int

    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    sliding_window: int

    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    swiglu_limit: float
    gate_temp: float = 1.0

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int | None

    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    vision_config: VisionConfig | None = None

    @cached_property
    def split_layer(self) -> int:
        """First layer of ratio 1: encoder layers are below it, decoder layers start here (20 as released)."""
        return self.compress_ratios.index(1)

    def ratio(self, layer: int) -> int:
        """Compression ratio of a backbone layer: 0, 1 or 2."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """Layer whose global KV and index keys `layer` reads; None for a window-only layer."""
        return _nearest(self.kv_source_layer_ids, layer) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """Layer whose selected entries `layer` attends to; None for a window-only layer."""
        return _nearest(self.index_source_layer_ids, layer) if self.ratio(layer) else None

    def is_kv_source(self, layer: int) -> bool:
        """Whether `layer` owns a compressor, an index key and a global cache."""
        return layer in self.kv_source_layer_ids

    def is_index_source(self, layer: int) -> bool:
        """Whether `layer` selects entries itself (Full and Reindex layers)."""
        return layer in self.index_source_layer_ids

    @property
    def engram_columns(self) -> int:
        """Table rows that one token reads in one Engram module: n-gram sizes times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_hash_vocab(self) -> int:
        """V_c of the hash: size of the compressed token map, or of the vocabulary when there is none."""
        return self.engram_compressed_vocab_size or self.vocab_size


def config_from_dict(document: Mapping[str, object], where: str = "config.json") -> ModelConfig:
    """Build a ModelConfig from a parsed ``config.json``.

    Raises CheckpointError, prefixed with `where`, for a missing, unknown, mistyped, unsupported or inconsistent key.
    """
    try:
        text, vision = split_document(document)
        scaling = parse_fields(RopeScaling, text.pop("rope_scaling"), "text_config.rope_scaling")
        tower = None if vision is None else parse_fields(VisionConfig, vision, "vision_config")
        made = {"rope_scaling": scaling, "vision_config": tower}
        config = parse_fields(ModelConfig, text, "text_config", made)
        check_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return config


def read_config_document(directory: str | Path) -> dict[str, object]:
    """The parsed ``config.json`` of a model directory, unchecked; CheckpointError if it cannot be read as an object."""
    path = Path(directory) / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); is this a model directory?"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def load_config(directory: str | Path) -> ModelConfig:
    """Read and check ``config.json`` of a model directory; raises CheckpointError."""
    return config_from_dict(read_config_document(directory), str(Path(directory) / "config.json"))


def _nearest(sources: tuple[int, ...], layer: int) -> int:
    """Nearest source at or before `layer`; check_config has made sure that there is one."""
    return max(source for source in sources if source <= layer)
