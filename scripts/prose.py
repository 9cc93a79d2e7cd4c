"""Check how the package and its documentation are written.

    python scripts/prose.py [FILE ...]   # by default all files; exits with 1 if there are findings

A docstring begins with a verb in the imperative or with a noun. Comments are sentences. Lines of
the documentation have at most 100 columns. Words that readers stumble over have a plain
replacement. A sentence of the documentation has at most 40 words. A page has few "that", since
nouns are joined ("request tokens"), and a page that tells its reader what to do says "you". The
name of a test has at most one negation.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_COLUMNS = 100
MAX_WORDS = 40  # the longest sentence of a page
MAX_THAT, MIN_YOU = 8, 4  # in 1,000 words of a page, without code and tables
GENERATED = ("configuration.md", "what-fits.md")  # by scripts, with wide tables; not read here
REFERENCE = ("architecture.md", "benchmarks.md", "verified.md")  # they tell nobody what to do
_WORD = re.compile(r"[A-Za-z]+(?:-[a-z]+)*")
NEGATIONS = frozenset(_WORD.findall("no not never without nothing nobody none neither cannot"))
# Prepositions, pronouns and conjunctions: what begins with one has neither subject nor verb yet.
FIRST_WORDS = frozenset(
    _WORD.findall("""
    about above after all among any are as at because before behind below beside between
    both but by during each either every for from how if in into is it its lest neither
    nobody none of on one only or other others ours out over same since so than that their
    theirs them these they this those though through till to under until was were what
    whatever when where whether which who whoever whom whose why will with within without
""")
)
PLAIN = {
    "lest": "so that ... does not",
    "whoever": "a subject",
    "whatever": "any, or a list",
    "likeliest": "most likely",
    "twice over": "a number",
    "under way": "in progress",
    "nobody's": "a subject",
    "theirs": "a noun",
    "ours": "a noun",
    "is told": "receives",
    "are told": "receive",
    "is asked": "a verb in the active voice",
    "are asked": "a verb in the active voice",
    "is said": "is reported",
    "are said": "are reported",
    "hears": "receives",
    "put right": "correct",
    "no more than": "at most",
    "without a word": "silently",
    "who has gone": "who left",
    "is none of": "is not one of",
    "what is none": "a noun",
    "who has": "a noun with a verb",
    "goes on with": "continues with",
    "but for": "except for, or without",
}
_PLAIN = re.compile(r"\b(" + "|".join(map(re.escape, PLAIN)) + r")\b", re.IGNORECASE)
_LOOSE = re.compile(r"\bfor all [^.;:]* together\b|\bthose of\b", re.IGNORECASE)
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|pragma|ruff:|!|-\*-|mypy:|fmt:|nosec)")
_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)")
_FENCE = re.compile(r"^\s*(```|~~~)")
_NO_TEXT = re.compile(r"[|#<!]")  # tables, headings, HTML and pictures
_ITEM = re.compile(r" *([-*]|\d+\.) ")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)*]*\s+")


def first_word(text: str) -> str:
    """Return the first word in lower case, or nothing if the text begins otherwise."""
    match = _WORD.match(text.lstrip())
    return match[0].lower() if match else ""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment; lines that follow one another are one comment."""
    previous, start, text, trailing = -1, 0, "", False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        line, column = token.start
        own = not token.line[:column].strip()
        words = token.string.lstrip("# ")
        if own and not trailing and line == previous + 1:
            text += " " + words
        else:
            if text:
                yield start, text
            start, text, trailing = line, words, not own
        previous = line
    if text:
        yield start, text


def check_python(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text()
    for line, text in docstrings(ast.parse(source)):
        if (word := first_word(text)) in FIRST_WORDS:
            yield line, f"a docstring begins with {word!r}: begin with a verb or a noun"
        yield from plain_words(line, text)
    for line, text in comments(source):
        if (word := first_word(text)) in {"of", "that", "which", "whose", "who"}:
            yield line, f"a comment begins with {word!r}: write a sentence"
        yield from plain_words(line, text)


def check_test_names(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            negations = [word for word in node.name.split("_") if word in NEGATIONS]
            if len(negations) > 1:
                yield node.lineno, f"{node.name} has {' and '.join(negations)}: say what holds"


def check_page(path: Path) -> Iterator[tuple[int, str]]:
    in_code, start, paragraph = False, 0, ""
    words = Counter[str]()
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        is_fence = bool(_FENCE.match(line))
        if is_fence or in_code or not line.strip() or _NO_TEXT.match(line) or _ITEM.match(line):
            yield from plain_words(start, _CODE.sub("code", paragraph))
            yield from long_sentences(start, paragraph)
            words.update(word.lower() for word in _WORD.findall(_CODE.sub("code", paragraph)))
            start, paragraph = number, ""
        in_code ^= is_fence
        if not is_fence and not in_code and not line.startswith("    "):
            if len(line) > MAX_COLUMNS and not line.startswith(("|", "[", "<", "!")):
                yield number, f"{len(line)} columns; at most {MAX_COLUMNS}"
            paragraph += "" if _NO_TEXT.match(line) else f" {line.strip()}"
    yield from rates(words, path.name in REFERENCE)


def rates(words: Counter[str], is_reference: bool) -> Iterator[tuple[int, str]]:
    """Yield what a page has too often or too rarely."""
    total, you = words.total(), words["you"] + words["your"] + words["yours"]
    if 1000 * (that := words["that"]) > MAX_THAT * total:
        limit = f"at most {MAX_THAT} in 1,000"
        yield 1, f"{that} times 'that' in {total} words; {limit}: leave it out, or join the nouns"
    if 1000 * you < MIN_YOU * total and not is_reference:
        yield 1, f"{you} times 'you' in {total} words; at least {MIN_YOU} in 1,000: tell the reader"


def long_sentences(line: int, paragraph: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a paragraph that are too long. A piece of code counts as one word."""
    for sentence in _SENTENCE_END.split(_CODE.sub("code", paragraph)):
        if (count := len(sentence.split())) > MAX_WORDS:
            yield line, f"{count} words from {sentence[:40].strip()!r}; at most {MAX_WORDS}"


def plain_words(line: int, text: str) -> Iterator[tuple[int, str]]:
    for match in _PLAIN.finditer(text):
        yield line, f"{match[0]!r}: write {PLAIN[match[0].lower()]}"
    for match in _LOOSE.finditer(" ".join(text.split())):
        yield line, f"{match[0]!r}: join the nouns, or say which ones"


def main(names: list[str]) -> int:
    files = [Path(name) for name in names] or [
        *sorted((ROOT / "megatron_vlm").rglob("*.py")),
        *sorted((ROOT / "scripts").rglob("*.py")),
        *sorted((ROOT / "tests").rglob("test_*.py")),
        ROOT / "README.md",
        *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED),
    ]
    count = 0
    for path in files:
        check = check_python if path.suffix == ".py" else check_page
        check = check_test_names if path.name.startswith("test_") else check
        for line, problem in check(path):
            count += 1
            print(f"{path}:{line}: {problem}")
    print(f"{count} findings" if count else "The prose is plain.")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
