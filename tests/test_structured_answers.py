"""Structured answers through prefill and decode ranks: the tokens of one process, and in the language.

Drafts, the overlapped loop and unconstrained neighbours must change nothing.
"""

import json
import re
from collections.abc import Callable, Iterator

import jsonschema
import pytest
import torch

from headrace.cluster.generate import continue_prompt, open_for_one, prompt_logits
from headrace.decode.config import DecodeConfig
from headrace.decode.grammar import GrammarState
from headrace.decode.grammar_compiler import GrammarCompiler
from headrace.decode.speculation_config import SpeculationConfig
from headrace.model.answer import parse_answer
from headrace.model.network import Network
from headrace.tests.pools import CHECKPOINT, answer, start_pool
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub
from headrace.transfer.request import Grammar, Request, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "level": {"enum": ["low", "high"]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["name", "level", "sizes"],
}
TOOL = {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}}
GRAMMARS = {
    "schema": Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    "regex": Grammar(kind="regex", text=r"[0-9]{3}-[a-z]{2,4}!"),
    "ebnf": Grammar(
        kind="ebnf", text='root ::= pair ("," pair)?\npair ::= [a-c] "=" ("yes" | "no")'
    ),
    "trigger": Grammar(kind="regex", text="(yes|no)", trigger="e"),
    "call": Grammar(kind="tool_call_required", text=json.dumps({"tools": [TOOL]})),
}


def is_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_call(text: str) -> bool:
    message, called = parse_answer(
        text, thinking=False, in_calls=True, is_whole=True, call_prefix="c"
    )
    calls = message["tool_calls"]
    return called and all(
        call["function"]["name"] == "measure" and is_schema(call["function"]["arguments"])
        for call in calls
    )


CHECKS: dict[str, Callable[[str], object]] = {
    "schema": is_schema,
    "regex": re.compile(r"[0-9]{3}-[a-z]{2,4}!").fullmatch,
    "ebnf": re.compile("[a-c]=(yes|no)(,[a-c]=(yes|no))?").fullmatch,
    "trigger": re.compile("[^e]*e(yes|no)", re.DOTALL).fullmatch,
    "call": is_call,
}


def requests(network: Network) -> list[Request]:
    """Every grammar greedily and at temperature 1, and a neighbour without one for each."""
    encode, asked = network.tokenizer.encode_prompt, list[Request]()
    for number, name in enumerate((*GRAMMARS, *GRAMMARS)):
        common = {"max_tokens": 150, "temperature": float(number >= len(GRAMMARS)), "seed": number}
        prompt = tuple(encode(f"Question {number}: what is it?\n"))
        constrained = SamplingParams(**common, grammar=GRAMMARS[name])  # type: ignore[arg-type]
        plain = SamplingParams(**{**common, "max_tokens": 20})  # type: ignore[arg-type]
        asked += [
            Request(request_id=f"{name}.{number}", prompt_ids=prompt, sampling=constrained),
            Request(request_id=f"plain.{number}", prompt_ids=prompt, sampling=plain),
        ]
    return asked


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def network() -> Network:
    return open_for_one(CHECKPOINT, 300, numerics="released")


@pytest.fixture(scope="module")
def expected(network: Network) -> dict[str, tuple[int, ...]]:
    """Tokens of one process, one request after another, without drafts."""
    compiler, found = GrammarCompiler(network.tokenizer), dict[str, tuple[int, ...]]()
    for request in requests(network):
        network.cache.clear_slot(1)
        params = request.sampling
        first = list(prompt_logits(network, request.prompt_ids, exact=False, score=False))[-1]
        grammar = GrammarState(compiler.submit(params.grammar).wait(60)) if params.grammar else None
        steps = continue_prompt(
            network,
            request.prompt_ids,
            first,
            params,
            exact=False,
            num_logprobs=0,
            grammar=grammar,
        )
        found[request.request_id] = tuple(step.token_id for step in steps)
    compiler.close()
    return found


def test_every_answer_that_ended_belongs_to_its_language(
    network: Network, expected: dict[str, tuple[int, ...]]
) -> None:
    tokenizer, num_ended = network.tokenizer, 0
    for name, ids in expected.items():
        kind = name.partition(".")[0]
        if kind != "plain" and ids[-1] == tokenizer.eos_token_id:
            num_ended += 1
            assert CHECKS[kind](tokenizer.decode(ids)), (name, tokenizer.decode(ids))
    assert num_ended >= 6


@pytest.mark.parametrize(
    "decode",
    [
        DecodeConfig(speculation=SpeculationConfig(proposer="off"), overlap=False),
        DecodeConfig(speculation=SpeculationConfig(schedule="fixed")),
        DecodeConfig(speculation=SpeculationConfig(proposer="ngram", num_drafts=6)),
    ],
    ids=["plain loop", "all drafts", "n-grams"],
)
def test_ranks_give_the_tokens_of_one_process(
    network: Network, expected: dict[str, tuple[int, ...]], decode: DecodeConfig
) -> None:
    hub = LoopbackHub()
    prefill = start_pool("prefill", 1, 256, lambda n, a: LoopbackBackend(hub, n, a))
    decoding = start_pool("decode", 1, 256, lambda n, a: LoopbackBackend(hub, n, a), decode=decode)
    try:
        prefill.connect(decoding)
        decoding.connect(prefill)
        assert answer(prefill, decoding, requests(network)) == expected
    finally:
        decoding.stop()
        prefill.stop()
