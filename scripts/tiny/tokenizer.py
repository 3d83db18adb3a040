"""The tiny checkpoint's tokenizer: byte-level BPE of 4096 ids with the released special tokens at fixed places."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

VOCAB_SIZE = 4096
FIRST_TAIL_ID = 4072  # ids from here on are special tokens; merges fill the ids below
IMAGE_ID, NOISE_ID = 4090, 4091
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
STRUCTURE = [
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    None,
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
]
WORDS = r"[^\r\n\p{L}\p{N}\p{P}\p{S}]?[\p{L}\p{M}]+|[\p{P}\p{S}]\p{L}+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tail_tokens() -> list[str]:
    """Contents of ids 4072..4095, in order; unused ids are place holders."""
    tokens = [
        STRUCTURE[i] if i < len(STRUCTURE) else None for i in range(VOCAB_SIZE - FIRST_TAIL_ID)
    ]
    tokens[IMAGE_ID - FIRST_TAIL_ID] = "<｜deepseek_image｜>"
    return [token or f"<｜place▁holder▁no▁{FIRST_TAIL_ID + i}｜>" for i, token in enumerate(tokens)]


def train(texts: Iterable[str]) -> Tokenizer:
    """Learns the merges, then moves the special tokens to their ids by rewriting the serialised form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_TAIL_ID,
        special_tokens=[BOS, EOS, PAD],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != FIRST_TAIL_ID:
        raise ValueError(
            f"the text yields {tokenizer.get_vocab_size()} ids, {FIRST_TAIL_ID} are needed: give more text"
        )
    plain = {
        token for token in STRUCTURE if token
    }  # kept by `skip_special_tokens`, as in the release
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=token not in plain) for token in tail_tokens()]
    )
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` in the released layout."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
    )
