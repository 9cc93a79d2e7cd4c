# .venv/bin/python -m pytest tests/serve/test_answer_grammar.py
"""What answers are held to: the fields of all clients, calls of tools as their templates write
them, and grammars that are refused in bounded work."""

import json
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from megatron_vlm.config.schema import Config, ModelConfig
from megatron_vlm.data.tokens.answer_masks import AnswerMasks, unpack_masks
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.family import read_sizes
from megatron_vlm.serve.chat_texts import TokenizerTexts
from megatron_vlm.serve.http.answer_grammar import (
    Grammar,
    GrammarFields,
    check_grammar,
    forced_tools,
    grammar_of_format,
    whole_grammar,
)
from megatron_vlm.serve.protocol.chat_messages import read_answer
from megatron_vlm.serve.protocol.payloads import RequestError
from tests.serve.test_chat_blocks import TEMPLATES

SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
TEXT = json.dumps(SCHEMA)
ANY = '{"type": "object"}'
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
READ: dict[str, tuple[dict[str, Any], tuple[str, str] | None]] = {
    "none": ({}, None),
    "text": ({"response_format": {"type": "text"}}, None),
    "object": ({"response_format": {"type": "json_object"}}, ("json", ANY)),
    "schema": ({"response_format": NAMED}, ("json", TEXT)),
    "guided_json": ({"guided_json": SCHEMA}, ("json", TEXT)),
    "as text": ({"guided_json": TEXT}, ("json", TEXT)),
    "guided_choice": ({"guided_choice": ["a", 'b"']}, ("choice", '["a", "b\\""]')),
    "guided_regex": ({"guided_regex": "a/+"}, ("regex", "a/+")),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
    "outputs": ({"structured_outputs": {"choice": ["a"], "regex": None}}, ("choice", '["a"]')),
    "any object": ({"structured_outputs": {"json_object": True}}, ("json", ANY)),
}


@pytest.mark.parametrize("name", READ)
def test_fields_of_each_client_are_read(name: str) -> None:
    fields, expected = READ[name]
    grammar = GrammarFields.model_validate(fields).grammar
    assert expected == (grammar and tuple(grammar[:2]))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"response_format": {"type": "xml"}}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "list": ({"response_format": [1]}, "response_format"),
    "two": ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex"),
    "empty": ({"guided_choice": []}, "guided_choice"),
    "number": ({"guided_regex": 3}, "guided_regex"),
    "broken": ({"guided_json": "{"}, "guided_json"),
    "tag": ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_its_field(name: str) -> None:
    fields, words = MISTAKES[name]
    with pytest.raises(RequestError, match=words.replace(".", r"\.")):
        assert GrammarFields.model_validate(fields).grammar


def test_anthropics_and_responses_formats_have_no_inner_object() -> None:
    flat = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    assert grammar_of_format(flat, "text.format") == Grammar("json", TEXT, "text.format")


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def powers(keyword: str) -> list[dict[str, Any]]:
    return [
        {keyword: [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(14)
    ]


SLOW = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(40)]
HOSTILE: dict[str, tuple[str, Any]] = {
    "deep": ("json", deep(120)),
    "deep items": ("json", '{"items":' * 9000 + "{}" + "}" * 9000),
    "deep anyOf": ("json", '{"anyOf":[' * 5000 + "{}" + "]}" * 5000),
    "anyOf power": ("json", {"allOf": powers("anyOf")}),
    "oneOf power": ("json", {"allOf": powers("oneOf")}),
    "automata": ("json", {"allOf": SLOW}),
    "automata inside": ("json", {"type": "array", "items": {"allOf": SLOW}}),
    "automata twice": ("json", {"anyOf": [{"allOf": SLOW}, {"allOf": SLOW[::-1]}]}),
    "many properties": ("json", {"properties": {f"p{i}": {} for i in range(6000)}}),
    "many objects": (
        "json",
        {"anyOf": [{"properties": {f"p{i}{j}": {} for j in range(8)}} for i in range(900)]},
    ),
    "size": ("json", {"enum": ["a" * 200_000]}),
    "many values": ("json", {"enum": [f"{i:x}" * 9 for i in range(9000)]}),
    "nested regex": ("json", {"type": "string", "pattern": "(" * 5000 + ")" * 5000}),
    "remote": ("json", {"$ref": "http://127.0.0.1:1/schema"}),
    "file": ("json", {"$ref": "file:///etc/passwd"}),
    "dangling": ("json", {"$ref": "#/$defs/none"}),
    "type": ("json", {"type": "colour"}),
    "type 3": ("json", {"type": 3}),
    "not": ("json", {"not": {"type": "string"}}),
    "if": ("json", {"if": {"type": "string"}, "then": {"minLength": 3}}),
    "unique": ("json", {"type": "array", "uniqueItems": True}),
    "empty enum": ("json", {"enum": []}),
    "empty range": ("json", {"type": "string", "minLength": 5, "maxLength": 3}),
    "empty numbers": ("json", {"type": "integer", "minimum": 5, "maximum": 3}),
    "huge integer": ("json", {"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    "huge number": ("json", {"type": "number", "minimum": 1e-300, "maximum": 1e300}),
    "multiple": ("json", {"type": "integer", "multipleOf": 10**15 + 7}),
    "negative": ("json", {"type": "string", "maxLength": -1}),
    "look-ahead": ("json", {"type": "string", "pattern": "(?=a)b"}),
    "back-reference": ("json", {"type": "string", "pattern": r"(a)\1"}),
    "properties 3": ("json", {"properties": 3}),
    "option": ("json", {"x-guidance": {"whitespace_pattern": "("}, "type": "object"}),
    "regex": ("regex", "("),
    "deep regex": ("regex", "(" * 30_000 + ")" * 30_000),
    "regex look": ("regex", "(?=a)b"),
    "lexemes": (
        "grammar",
        "\n".join(["start: A0", *(f"A{i}: A{i + 1} A{i + 1}" for i in range(60))]),
    ),
    "deep rule": ("grammar", "start: " + "(" * 20_000 + ")" * 20_000),
    "import": ("grammar", "%import common.X\nstart: X"),
    "no start": ("grammar", 'begin: "a"'),
    "json in it": ("grammar", 'start: %json {"type": "colour"}'),
}


def test_hostile_grammars_are_refused_in_bounded_work() -> None:
    """Each in a process of its own, which ends after half a second of work."""
    assert len(HOSTILE) == 40
    taken = []
    for name, (kind, value) in HOSTILE.items():
        text = value if isinstance(value, str) else json.dumps(value)
        try:
            check_grammar(Grammar(kind, text, name))
        except RequestError as error:
            assert error.key == name
        else:
            taken.append(name)
    assert not taken
    check_grammar(Grammar("json", TEXT, "usual"))


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 50},
        "side": {"type": "string", "enum": ["left", "right"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "box": {"$ref": "#/$defs/box"},
    },
    "required": ["x", "side"],
    "additionalProperties": False,
    "$defs": {"box": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
# A number of a free object may be beyond all floats, which leaves the call a text.
ANY_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": 'd"o', "parameters": ANY_TEXTS}},
]


@pytest.fixture(scope="module")
def texts_of(tiny, tmp_path_factory):
    """Return the texts of a model whose template writes calls as JSON, or as XML."""

    def make(is_xml: bool) -> TokenizerTexts:
        path = tiny(vocab=509)
        texts = TokenizerTexts(Config(model=ModelConfig(path=path)), read_sizes(path), 10**6)
        if is_xml:
            texts.tokenizer.chat_template = (TEMPLATES / "qwen3_5.jinja").read_text()
        return texts

    return make


def walk(texts: TokenizerTexts, grammar: Grammar, rng: Random) -> str:
    """Return a random answer that is held to a grammar. Texts and thoughts end soon."""
    masks = AnswerMasks(texts.tokenizer, 509)
    stop = texts.tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = SamplingSettings(999, stop_ids=(stop,), grammar=tuple(grammar[:2]))
    draw: Any = SimpleNamespace(settings=settings, ids=[], matcher=None)
    ends = [texts.encode(text) for text in ("</parameter>", "</think>", '"')]
    wanted: list[int] = []
    while len(draw.ids) < 999:
        [allowed_V] = unpack_masks(masks.begin([draw]).result(), 509)
        allowed = allowed_V.nonzero()[:, 0].tolist()
        assert allowed, draw.matcher.get_error()
        if stop in allowed:
            assert draw.matcher.is_accepting()
            if rng.random() < 0.5 or allowed == [stop]:
                return texts.text(draw.ids)
            allowed.remove(stop)
        whole = [end for end in ends if draw.matcher.validate_tokens(end) == len(end)]
        if not wanted and whole and rng.random() < 0.3:
            wanted = list(rng.choice(whole))
        draw.ids.append(wanted.pop(0) if wanted else rng.choice(allowed))
    raise AssertionError(texts.text(draw.ids))


@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize("is_xml", [False, True])
def test_calls_come_back_as_they_were_forced(texts_of, is_xml: bool, is_thinking: bool) -> None:
    texts, rng, seen = texts_of(is_xml), Random(3), set()
    thoughts = texts.thoughts_rule() if is_thinking else None
    for number in range(24):
        calls = texts.call_rules(TOOLS, is_single=number % 2 == 0)
        grammar = whole_grammar(None, calls, True, thoughts)
        text = walk(texts, grammar, rng)
        answer = read_answer(texts.chat_format, text, is_thinking, TOOLS)
        assert answer.calls and not answer.content, text
        assert len(answer.calls) == 1 or number % 2
        assert (answer.thoughts is not None) == is_thinking
        for call in answer.calls:
            seen |= {call.name, *call.arguments}
            schema = PARAMETERS if call.name == "look" else ANY_TEXTS
            jsonschema.validate(call.arguments, schema)
    assert seen >= {"look", 'd"o', "x", "side", "note", "box"}


def test_an_answer_beside_tools_is_a_call_or_keeps_to_its_format(texts_of) -> None:
    texts, rng, kinds = texts_of(False), Random(1), set()
    calls = texts.call_rules(TOOLS, is_single=True)
    for kind, value in (("json", TEXT), ("choice", '["left", "a/b"]'), ("regex", "a/[0-9]{2}")):
        grammar = whole_grammar(Grammar(kind, value, "f"), calls, False, texts.thoughts_rule())
        assert grammar.field == "f"
        check_grammar(grammar)
        for _ in range(6):
            answer = read_answer(texts.chat_format, walk(texts, grammar, rng), True, TOOLS)
            kinds.add(kind if answer.content else "call")
            if kind == "json" and answer.content:
                jsonschema.validate(json.loads(answer.content), SCHEMA)
    assert kinds == {"json", "choice", "regex", "call"}


def test_tools_are_forced_by_either_api() -> None:
    look = TOOLS[0]
    named = {"type": "function", "function": {"name": "look"}}
    assert forced_tools("auto", TOOLS) == forced_tools({"type": "none"}, []) == ()
    assert forced_tools("required", TOOLS) == forced_tools({"type": "any"}, TOOLS) == TOOLS
    for choice in (named, {"type": "tool", "name": "look"}, {"type": "function", "name": "look"}):
        assert forced_tools(choice, TOOLS) == [look]
    for choice in ({"type": "tool", "name": "jump"}, "always", {"type": "allowed_tools"}, 3):
        with pytest.raises(RequestError, match="tool_choice"):
            forced_tools(choice, TOOLS)
    with pytest.raises(RequestError, match="tool_choice"):
        forced_tools("required", [])


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"type": "string", "pattern": "a"}}},
        {"properties": {"x": {"type": "string", "maxLength": 3}}},
        {"properties": {"x>": {"type": "string"}}},
        {"anyOf": [{"properties": {}}]},
    ],
)
def test_what_xml_cannot_hold_is_refused_by_name(texts_of, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    with pytest.raises(MegatronVLMError):
        texts_of(True).call_rules([tool], is_single=True)
    assert "call0" in texts_of(False).call_rules([tool], is_single=True)
