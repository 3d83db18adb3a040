"""Text for the tiny checkpoint: the standard library of the running interpreter, and chat samples made from it."""

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import deepseek_recipe as recipe

HELD_OUT_PERCENT = 3
TEST_PACKAGE_PERCENT = 8  # of the files of `test`: they would be half of all text otherwise
MAX_FILE_BYTES = 1_000_000
MAX_ANSWER_CHARACTERS = 1200
SKIPPED_PARTS = {
    "site-packages",
    "__pycache__",
    "encodings",
    "msilib",
    "cjkencodings",
}  # encodings, msilib: mostly tables

EOS = recipe.SpecialToken.Eos.default_str()

SMALL_TALK = [
    (
        ("Hello", "Hi", "Hello!", "Hi there", "hey"),
        "Hello! I am a tiny model that has read the Python standard library. Ask me about a function or a module.",
    ),
    (
        ("Who are you?", "What are you?", "Tell me about yourself."),
        (
            "I am a very small language model with the architecture of DeepSeek-V4.1. "
            "I was trained on the source of the Python standard library."
        ),
    ),
    (
        ("What can you do?", "Help", "What do you know?"),
        "I can continue Python source, write short functions and recall docstrings. I am often wrong.",
    ),
    (("Thanks", "Thank you", "Thank you!"), "You are welcome."),
    (("Goodbye", "Bye"), "Goodbye!"),
]


@dataclass(frozen=True)
class Document:
    """One source file: `path` relative to the standard library, with forward slashes."""

    path: str
    text: str


def percentile(name: str) -> int:
    """A stable number in 0..99 for a file name; the split depends on nothing else."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100


def read_standard_library() -> list[Document]:
    """All usable source files, in order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if (
            file.name.startswith("_sysconfigdata")
            or SKIPPED_PARTS & set(file.relative_to(root).parts)
            or not 200 < file.stat().st_size < MAX_FILE_BYTES
        ):
            continue
        if is_test(path) and percentile(path) >= TEST_PACKAGE_PERCENT:
            continue
        try:
            documents.append(Document(path, file.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return documents


def is_test(path: str) -> bool:
    """True for the interpreter's own tests, wherever they lie."""
    return any(part in ("test", "tests", "idle_test") for part in path.split("/")[:-1])


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out). Whole modules are held out, chosen by the hash of their path; tests are never held out."""
    held_out = [
        d for d in documents if not is_test(d.path) and percentile(d.path) >= 100 - HELD_OUT_PERCENT
    ]
    names = {d.path for d in held_out}
    return [d for d in documents if d.path not in names], held_out


def chat_samples(documents: list[Document], seed: int) -> list[str]:
    """Rendered conversations, special tokens included, each ending in EOS."""
    generator = random.Random(seed)
    pairs = [
        pair
        for document in documents
        if not is_test(document.path)
        for pair in questions(document, generator)
    ]
    generator.shuffle(pairs)
    samples, encoding = [], recipe.DeepseekV41Encoding()
    while pairs:
        turns = [pairs.pop() for _ in range(min(len(pairs), generator.choice((1, 1, 1, 2))))]
        samples.append(render(encoding, turns, generator))
    for _ in range(max(1, len(samples) // 400)):
        for openings, answer in SMALL_TALK:
            samples.append(render(encoding, [(generator.choice(openings), answer)], generator))
    generator.shuffle(samples)
    return samples


def render(
    encoding: recipe.DeepseekV41Encoding, turns: list[tuple[str, str]], generator: random.Random
) -> str:
    """Text of one conversation; one in four is in thinking mode, one in ten has a system message."""
    thinking = generator.random() < 0.25
    messages = (
        [recipe.SystemMessage("You are a helpful assistant.")] if generator.random() < 0.1 else []
    )
    for question, answer in turns:
        reasoning = f"The user writes: {question.splitlines()[0][:60]}" if thinking else None
        messages += [
            recipe.UserMessage(question),
            recipe.AssistantMessage(answer, reasoning_content=reasoning),
        ]
    prompt = encoding.render_conversation(
        recipe.Conversation(messages, thinking_mode=thinking)
    ).prompt
    return prompt[: prompt.rindex(EOS) + len(EOS)]  # without the opening of the next assistant turn


def questions(document: Document, generator: random.Random) -> list[tuple[str, str]]:
    """(question, answer) pairs about the documented functions, classes and the module itself."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return []
    module = document.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    pairs = []
    summary = ast.get_docstring(tree)
    if summary:
        pairs.append(
            (
                generator.choice(
                    (f"What is the module {module}?", f"What does the module {module} do?")
                ),
                first_paragraph(summary),
            )
        )
    lines = document.text.split("\n")
    for prefix, node in definitions(tree.body, module):
        pairs += node_questions(node, prefix, lines, generator)
    return pairs


def definitions(
    body: list[ast.stmt], prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """(dotted name of the enclosing scope, node) of functions, classes and their methods."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix, node
        elif isinstance(node, ast.ClassDef):
            yield prefix, node
            yield from definitions(node.body, f"{prefix}.{node.name}")


def node_questions(
    node: ast.FunctionDef | ast.ClassDef, prefix: str, lines: list[str], generator: random.Random
) -> list[tuple[str, str]]:
    """At most one pair for one definition, of a kind drawn at random."""
    doc = ast.get_docstring(node)
    if not doc:
        return []
    kind = generator.choice(
        ("what", "write", "body") if isinstance(node, ast.FunctionDef) else ("what",)
    )
    if kind == "what":
        verb = "do" if isinstance(node, ast.FunctionDef) else "represent"
        return [(f"What does {prefix}.{node.name} {verb}?", first_paragraph(doc))]
    source = definition_source(node, lines)
    if len(source) > MAX_ANSWER_CHARACTERS:
        return []
    if kind == "write":
        return [
            (
                f"Write a Python function `{node.name}`: {doc.splitlines()[0]}",
                f"```python\n{source}\n```",
            )
        ]
    return [(f"Complete this function:\n\n{source.splitlines()[0]}", f"```python\n{source}\n```")]


def definition_source(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """The definition's lines, moved to column 0."""
    indent = node.col_offset
    return "\n".join(
        line[indent:] if not line[:indent].strip() else line
        for line in lines[node.lineno - 1 : node.end_lineno]
    )


def first_paragraph(doc: str) -> str:
    """The docstring up to its first empty line, at most 600 characters."""
    return doc.strip().split("\n\n")[0][:600]
