"""``headrace generate`` with every flag, in this process, on a network of random weights."""

import argparse
import json
from typing import Any

import numpy as np
import pytest

from headrace.cluster.generate import add_arguments, run
from headrace.model.config import load_config
from headrace.model.tokenizer import Tokenizer
from headrace.tests.fake_network import CHECKPOINT
from headrace.transfer.errors import ConfigError, InvalidRequestError

COMMON = ["--ids", "5,6,7,8", "--max-tokens", "12", "--ignore-eos", "--json"]
SAMPLED = ["--temperature", "1", "--seed", "3"]


def generate(*flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    document = run(parser.parse_args([str(CHECKPOINT), *COMMON, *flags]))
    return json.loads(json.dumps(document))


@pytest.fixture(scope="module")
def sampled() -> list[int]:
    """The ids of SAMPLED; every one of them is drawn from hundreds of likely ones."""
    return generate(*SAMPLED)["ids"]


def test_a_seed_gives_the_same_answer_and_another_seed_another(sampled: list[int]) -> None:
    again = generate(*SAMPLED)
    assert again["ids"] == sampled and again["finish_reason"] == "length"
    assert generate(*SAMPLED, "--seed", "4")["ids"] != sampled


def test_a_bias_bans_or_forces_ids(sampled: list[int]) -> None:
    banned = generate(*SAMPLED, "--logit-bias", f"{sampled[0]}=-100,{sampled[1]}=-100")["ids"]
    assert not {sampled[0], sampled[1]} & set(banned)
    assert generate("--logit-bias", "7=100")["ids"] == [7] * 12
    ids = generate("--logit-bias", "7=100,8=99", "--presence-penalty", "2")["ids"]
    assert ids[:2] == [7, 8]
    ids = generate("--logit-bias", "7=100,8=99.9", "--frequency-penalty", "0.5")["ids"]
    assert abs(ids.count(7) - ids.count(8)) <= 1 and set(ids) == {7, 8}
    # ids 5 to 8 are in the prompt: id 7 is halved at once, and so is 9 once it was there
    ids = generate("--logit-bias", "7=100,9=80", "--repetition-penalty", "2")["ids"]
    assert ids[:2] == [9, 7]


def test_min_p_of_one_is_greedy() -> None:
    assert generate(*SAMPLED, "--min-p", "1")["ids"] == generate()["ids"]


def test_ids_and_strings_end_an_answer(sampled: list[int]) -> None:
    pieces = Tokenizer(CHECKPOINT, load_config(CHECKPOINT)).text_bytes
    third = sampled.index(sampled[2]) + 1
    document = generate(*SAMPLED, "--stop-token-ids", f"3,{sampled[2]}")
    assert document["ids"] == sampled[:third] and document["finish_reason"] == "stop"
    longer = generate(*SAMPLED, "--stop-token-ids", f"3,{sampled[2]}", "--min-tokens", "5")
    assert len(longer["ids"]) > 5 and sampled[2] not in longer["ids"][:5]

    whole = b"".join(pieces[token] for token in sampled).decode(errors="replace")
    stop = whole[5:8]
    document = generate(*SAMPLED, "--stop", "no such text", "--stop", stop)
    assert document["text"] == whole[: whole.index(stop)]
    assert document["ids"] == sampled[: len(document["ids"])]
    assert document["finish_reason"] == "stop"


def test_text_that_streams_is_the_text_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    document = generate(*SAMPLED, "--stop", "no such text")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = [flag for flag in COMMON if flag != "--json"]
    args = parser.parse_args([str(CHECKPOINT), *flags, *SAMPLED, "--stop", "no such text"])
    assert run(args) is None
    assert capsys.readouterr().out == document["text"] + "\n"


def test_logprobs_of_answer_and_prompt() -> None:
    document = generate(*SAMPLED, "--logprobs", "--top-logprobs", "512", "--prompt-logprobs", "3")
    for token, logprob, top in zip(
        document["ids"], document["logprobs"], document["top_logprobs"], strict=True
    ):
        assert logprob == top["logprobs"][top["ids"].index(token)]
        assert np.exp(top["logprobs"]).sum() == pytest.approx(1)
    scored = generate(*SAMPLED, "--score", "--top-logprobs", "512")
    assert scored["ids"] == document["ids"], "both run all layers for all prompt rows"
    assert len(document["prompt_logprobs"]) == 3
    for token, entry, top in zip(
        [6, 7, 8], document["prompt_logprobs"], scored["prompt_top_logprobs"][:3], strict=True
    ):
        assert (entry["ids"], entry["logprobs"]) == (top["ids"][:3], top["logprobs"][:3])
        assert entry["rank"] == top["ids"].index(token) + 1
        assert entry["logprob"] == top["logprobs"][entry["rank"] - 1]
    assert "logprobs" not in scored and "prompt_logprobs" not in scored


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--logit-bias", "512=1"], "logit_bias id = 512 is not allowed: an id from 0 to 511"),
        (["--logit-bias", "5"], "--logit-bias '5': give ID=BIAS pairs"),
        (["--logit-bias", "5=x"], "ID=BIAS"),
        (["--logit-bias", "5=nan"], "logit_bias of 5 = nan is not allowed: a number from -100"),
        (["--stop-token-ids", "512"], "stop_token_ids id = 512"),
        (["--stop-token-ids", "a"], "--stop-token-ids 'a'"),
        (["--stop", ""], "up to 64 strings of 1 to 1024 characters"),
        (["--min-p", "1.5"], "min_p = 1.5 is not allowed: a number from 0 to 1"),
        (["--presence-penalty", "3"], "presence_penalty = 3.0"),
        (["--frequency-penalty", "nan"], "frequency_penalty = nan"),
        (["--repetition-penalty", "0"], "repetition_penalty = 0.0"),
        (["--min-tokens", "13"], "min_tokens = 13 is not allowed: an integer from 0 to max_tokens"),
        (["--prompt-logprobs", "21"], "prompt_logprobs = 21"),
        (["--top-logprobs", "513"], "--top-logprobs 513"),
        (["--ids", "5,x"], "--ids '5,x'"),
        (["--ids", ""], "--ids ''"),
    ],
)
def test_bad_values_are_refused_with_what_is_allowed(flags: list[str], said: str) -> None:
    with pytest.raises((InvalidRequestError, ConfigError)) as error:
        generate(*flags)
    assert said in str(error.value)
