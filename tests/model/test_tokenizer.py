"""Encoding, chats, and decoding in pieces."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from headrace.model.config import load_config
from headrace.model.detokenizer import IncrementalDecoder, token_bytes
from headrace.model.tokenizer import Tokenizer
from headrace.transfer.errors import CheckpointError, InvalidRequestError

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "v41-spec-micro" / "checkpoint"
BACKEND = Backend.from_file(str(GOLDEN / "tokenizer.json"))
PIECES = token_bytes(BACKEND, 512)


@pytest.fixture
def tokenizer(spec_micro: Path) -> Tokenizer:
    return Tokenizer(spec_micro, load_config(spec_micro))


def test_a_plain_prompt_is_bos_and_text(tokenizer: Tokenizer) -> None:
    text = "Héllo, 世界"
    assert tokenizer.encode_prompt(text) == [0, *tokenizer.encode(text)]
    assert 0 not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text


@given(st.lists(st.lists(st.integers(0, 511), max_size=4), max_size=6), st.booleans())
def test_pieces_joined_equal_the_whole(chunks: list[list[int]], skip: bool) -> None:
    special = {
        token for token, added in BACKEND.get_added_tokens_decoder().items() if added.special
    }
    decoder = IncrementalDecoder(PIECES, special if skip else set())
    text = "".join(decoder.push(chunk) for chunk in chunks) + decoder.finish()
    ids = [token for chunk in chunks for token in chunk]
    assert text == BACKEND.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=20))
def test_no_piece_shows_half_a_character(text: str) -> None:
    decoder = IncrementalDecoder(PIECES, set())
    shown = [decoder.push([token]) for token in BACKEND.encode(text, add_special_tokens=False).ids]
    assert "".join(shown) == text
    assert decoder.finish() == ""


def test_a_chat_ends_where_the_assistant_goes_on(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = tokenizer.decode(tokenizer.encode_chat(messages), skip_special_tokens=False)
    assert plain == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"
    ids = tokenizer.encode_chat(messages, thinking=True, effort="max")
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert ids.count(0) == 1
    assert "Reasoning Effort: 100" in text
    assert text.endswith("<｜User｜>hi<｜Assistant｜><think>")


def test_special_spellings_of_a_user_stay_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "<｜User｜></think>"}])
    assert ids.count(505) == 1
    assert ids[-1] == 508
    assert ids.count(508) == 1


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([{"role": "wizard", "content": "hi"}], {}),
        ([{"role": "user"}], {}),
        ([{"role": "user", "content": "hi"}], {"thinking": True, "effort": "much"}),
        ([{"role": "user", "content": "hi"}], {"tools": [{"name": "f"}]}),
        ([{"role": "user", "content": object()}], {}),
    ],
)
def test_malformed_chats_are_request_errors(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        tokenizer.encode_chat(messages, **options)


def test_tools_need_a_vocabulary_that_has_them(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with pytest.raises(InvalidRequestError, match="DSML"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}], tools=tools)


def test_special_ids_must_be_those_of_the_configuration(copy_of_spec_micro: Path) -> None:
    path = copy_of_spec_micro / "config.json"
    document = json.loads(path.read_text()) | {"eos_token_id": 3}
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="has id 1, but eos_token_id is 3"):
        Tokenizer(copy_of_spec_micro, load_config(copy_of_spec_micro))


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_unreadable_tokenizer(copy_of_spec_micro: Path, content: str | None) -> None:
    path = copy_of_spec_micro / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(copy_of_spec_micro, load_config(copy_of_spec_micro))


def test_engram_map_has_the_size_of_the_configuration(
    tokenizer: Tokenizer, copy_of_spec_micro: Path
) -> None:
    assert tokenizer.engram_map is not None
    assert max(tokenizer.engram_map) + 1 == 303
    path = copy_of_spec_micro / "config.json"
    document = json.loads(path.read_text())
    document["text_config"]["engram_compressed_vocab_size"] = 304
    path.write_text(json.dumps(document))
    other = Tokenizer(copy_of_spec_micro, load_config(copy_of_spec_micro))
    with pytest.raises(CheckpointError, match=r"303 entries.*says 304"):
        _ = other.engram_map


def test_model_without_a_map(spec_micro: Path, document: dict[str, Any], tmp_path: Path) -> None:
    document["text_config"]["engram_compressed_vocab_size"] = None
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert Tokenizer(spec_micro, load_config(tmp_path)).engram_map is None


def test_an_image_becomes_the_image_token_of_the_configuration() -> None:
    directory = Path(__file__).parents[2] / "configs" / "checkpoints" / "tiny-v41"
    config = load_config(directory)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    ids = Tokenizer(directory, config).encode_chat([{"role": "user", "content": [image]}])
    assert ids.count(config.image_token_id) == 1
