"""A real tokenizer, languages compiled in this process, and a model that knows nothing but its masks."""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.decode.grammar import CompiledLanguage, GrammarState, Masks
from headrace.decode.grammar_build import Vocabularies, build, open_vocabularies
from headrace.decode.grammar_trigger import Trigger
from headrace.model.config import load_config
from headrace.model.tokenizer import Tokenizer

DIRECTORY = Path(__file__).parents[2] / "configs" / "checkpoints" / "tiny-v41"
#: What a hurried writer reaches for.
ENDS = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b"]}")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(DIRECTORY, load_config(DIRECTORY))


@cache
def vocabularies() -> Vocabularies:
    special = tokenizer().special_ids
    pieces = [b"" if t in special else p for t, p in enumerate(tokenizer().token_bytes)]
    return open_vocabularies(pieces, [tokenizer().eos_token_id])


def language(kind: str, text: Any, trigger: str = "") -> CompiledLanguage:
    from xgrammar import GrammarMatcher

    compiled = build(vocabularies(), kind, text if isinstance(text, str) else json.dumps(text))
    return CompiledLanguage(
        compiled=compiled,
        trigger=Trigger(
            trigger,
            tokenizer().token_bytes,
            lambda rest: GrammarMatcher(compiled).accept_string(rest),
        )
        if trigger
        else None,
        stop_ids=(tokenizer().eos_token_id,),
        vocab_size=tokenizer().vocab_size,
        num_bytes=compiled.memory_size_bytes,
    )


def allowed(row: Masks) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little", count=tokenizer().vocab_size)
    return set(bits.nonzero()[0].tolist())


def accepts(of: CompiledLanguage, text: str) -> bool:
    """Whether `text`, one byte a token where need be, and then EOS go through."""
    state = GrammarState(of)
    eos = tokenizer().eos_token_id
    for token in (*tokenizer().encode(text), eos):
        if token not in allowed(state.mask()):
            return False
        state.advance([token])
    return True


@cache
def _ends() -> frozenset[int]:
    pieces = tokenizer().token_bytes
    return frozenset(token for token, piece in enumerate(pieces) if piece in ENDS)


def write(state: GrammarState, seed: int, patience: int = 40, most: int = 600) -> list[int] | None:
    """Random tokens under the masks until EOS, in a hurry after `patience` tokens; None if that was not enough."""
    chance, ids = random.Random(seed), list[int]()
    eos, pieces = tokenizer().eos_token_id, tokenizer().token_bytes
    while len(ids) < most:
        choices = sorted(allowed(state.masks()[0]))
        hurry = len(ids) > patience
        if eos in choices and (hurry or chance.random() < 0.5):
            choices = [eos]
        elif len(ids) > 4 * patience:
            closing = [t for t in choices if t in _ends()]
            choices = closing or sorted(choices, key=lambda t: len(pieces[t]))[:40]
        elif (hurry or chance.random() < 0.3) and (closing := [t for t in choices if t in _ends()]):
            choices = closing
        ids.append(chance.choice(choices))
        state.advance(ids[-1:])
        if ids[-1] == eos:
            return ids
    return None


def text_of(ids: Sequence[int]) -> str:
    return tokenizer().decode(ids)
