"""Makes ``configs/demo/prompts.jsonl``: batch lines from the sources of the running Python's standard library.

    python scripts/make_demo_prompts.py --requests 72 --mean-tokens 150 > configs/demo/prompts.jsonl

The packaged tiny model has learned from such text. Lines are completions (the beginning of a source file or of a
function), chats (questions about documented functions) and a few plain lines; half of them greedy, half sampled with a
seed. The same arguments under the same Python give the same file. The text is the Python Software Foundation's.
"""

import argparse
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import tokenizers

from headrace.scripts.tiny.corpus import Document, is_test, questions, read_standard_library

TOKENIZER = Path(__file__).parent.parent / "configs/checkpoints/tiny-v41/tokenizer.json"
MIN_TOKENS, MAX_TOKENS = 20, 1500
LENGTH_SPREAD = 1.1  # sigma of the logarithm of prompt lengths
THINKING_SHARE, SYSTEM_SHARE, LOGPROBS_SHARE = 0.15, 0.2, 0.1


class Maker:
    """Draws lines; all randomness comes from one seed."""

    def __init__(self, documents: list[Document], args: argparse.Namespace) -> None:
        self._documents = [document for document in documents if not is_test(document.path)]
        self._args = args
        self._random = random.Random(args.seed)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(args.tokenizer))
        self._lengths = [
            self._length((rank + 0.5) / args.requests) for rank in range(args.requests)
        ]
        self._random.shuffle(self._lengths)
        self._questions = [
            question
            for document in self._random.sample(self._documents, 60)
            for question, _ in questions(document, self._random)
        ]

    def line(self, number: int) -> dict[str, Any]:
        """Line ``number``: of nine lines one is plain, three are chats and five are completions."""
        sampling = self._sampling(number)
        if number % 9 == 8:
            return {
                "id": f"plain-{number:03}",
                "prompt": self._text(self._lengths[number]),
            } | sampling
        if number % 3 == 1:
            body = {"model": "tiny-v41", "messages": self._messages()} | sampling
            if self._random.random() < THINKING_SHARE:
                body["thinking"] = {"type": "enabled"}
            return _openai(f"chat-{number:03}", "/v1/chat/completions", body)
        body = {"model": "tiny-v41", "prompt": self._text(self._lengths[number])} | sampling
        if self._random.random() < LOGPROBS_SHARE:
            body["logprobs"] = 2
        return _openai(f"completion-{number:03}", "/v1/completions", body)

    def _sampling(self, number: int) -> dict[str, Any]:
        length = self._random.randint(self._args.min_output, self._args.max_output)
        if number % 2 == 0:
            return {"max_tokens": length, "temperature": 0}
        return {"max_tokens": length, "temperature": 0.7, "top_p": 0.95, "seed": number}

    def _messages(self) -> list[dict[str, str]]:
        turns = [{"role": "user", "content": self._random.choice(self._questions)}]
        if self._random.random() < SYSTEM_SHARE:
            turns.insert(0, {"role": "system", "content": "You are a helpful assistant."})
        return turns

    def _length(self, quantile: float) -> int:
        """Prompt lengths follow a log-normal distribution: many short ones, a few long ones."""
        centre = math.log(self._args.mean_tokens) - LENGTH_SPREAD**2 / 2
        length = math.exp(statistics.NormalDist(centre, LENGTH_SPREAD).inv_cdf(quantile))
        return min(max(round(length), MIN_TOKENS), MAX_TOKENS)

    def _text(self, num_tokens: int) -> str:
        """The head of a file, or what begins with a definition in it, cut at ``num_tokens`` tokens."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            text = self._random.choice(self._documents).text
            starts = [
                0,
                *(at + 1 for at in range(len(text)) if text.startswith(("\ndef ", "\nclass "), at)),
            ]
            text = text[self._random.choice(starts) :][: 20 * num_tokens]
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._tokenizer.decode(ids[:num_tokens]).rstrip("\ufffd")


def _openai(custom_id: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def main() -> None:
    """Writes the lines to standard output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=72)
    parser.add_argument(
        "--mean-tokens", type=int, default=150, help="of the prompts that are no chats"
    )
    parser.add_argument("--min-output", type=int, default=32)
    parser.add_argument("--max-output", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    args = parser.parse_args()
    maker = Maker(read_standard_library(), args)
    for number in range(args.requests):
        sys.stdout.write(json.dumps(maker.line(number), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
