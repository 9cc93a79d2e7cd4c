"""Grammars that answers are held to: a JSON schema, choices, a regular expression, a grammar, or
calls of tools. The fields of all routes are read here. They become one grammar, which llguidance or
vLLM carries out."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from megatron_vlm.serve.http.schemas import JsonForm
from megatron_vlm.serve.protocol.payloads import RequestError

MAX_GRAMMAR_BYTES = 2**17  # maximum bytes of a grammar
CHECKED = 64  # grammars whose check is remembered
_KINDS = ("json", "choice", "regex", "grammar")  # vLLM's words
_ANY_OBJECT = {"type": "object"}
Tools = Sequence[Mapping[str, Any]]


class Grammar(NamedTuple):
    """Grammar that an answer is held to."""

    kind: str
    text: str
    field: str  # the request's field that asks for it


class GrammarFields(JsonForm):
    """Fields of OpenAI's and of vLLM's clients."""

    response_format: Any = None
    structured_outputs: dict[str, Any] = Field({})
    guided_json: Any = None
    guided_choice: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that these fields hold the answer to."""
        given = [(f"guided_{kind}", kind, getattr(self, f"guided_{kind}")) for kind in _KINDS]
        given += [(f"structured_outputs.{k}", k, v) for k, v in self.structured_outputs.items()]
        found = [grammar_of_format(self.response_format, "response_format")]
        for field, kind, value in given:
            if value is not None and value is not False:
                if kind == "json_object":
                    kind, value = "json", _ANY_OBJECT
                found.append(_read(kind, value, field))
        grammars = [each for each in found if each is not None]
        if len(grammars) > 1:
            one, other = grammars[:2]
            problem = f"and {other.field} exclude each other"
            raise RequestError(problem, key=one.field, remedy="give one of them")
        return grammars[0] if grammars else None


def grammar_of_format(wanted: Any, field: str) -> Grammar | None:
    """Return what a format in OpenAI's or Anthropic's form holds an answer to."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if not wanted or kind == "text":
        return None
    if kind == "json_object":
        return _read("json", _ANY_OBJECT, field)
    inner = wanted.get("json_schema", wanted) if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        allowed = "the type text, json_object, or json_schema with a schema"
        raise RequestError(key=field, found=wanted, allowed=allowed)
    return _read("json", schema, field)


def _read(kind: str, value: Any, field: str) -> Grammar:
    """Return a grammar of this kind, whose text may be wrong."""
    if kind not in _KINDS:
        raise RequestError("is not supported", key=field, remedy=f"give {', '.join(_KINDS)}")
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"is not JSON: {error}", key=field) from error
    is_choice = isinstance(value, list) and value and all(isinstance(t, str) for t in value)
    is_text = isinstance(value, str) and value
    if not {"json": isinstance(value, dict), "choice": is_choice}.get(kind, is_text):
        allowed = {"json": "a schema", "choice": "a list of texts"}.get(kind, "a text")
        raise RequestError(key=field, found=value, allowed=allowed)
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value), field)


def forced_tools(choice: Any, tools: Tools, is_single: bool = False) -> Tools:
    """Return the tools of which an answer must call one, by tool_choice; none if it need not. With
    `is_single` nothing else limits the calls to one."""
    fields = choice if isinstance(choice, Mapping) else {"type": choice}
    kind, function = fields.get("type"), fields.get("function", fields)
    if kind in ("auto", "none"):
        if is_single and tools:
            raise RequestError(
                ": a single call cannot be enforced where no call is",
                key="tool_choice",
                found=choice,
                remedy="name a tool, require any, or allow parallel calls",
            )
        return ()
    wanted = function.get("name") if isinstance(function, Mapping) else None
    names = [each.get("function", each).get("name") for each in tools]
    forced = [each for each, name in zip(tools, names, strict=True) if wanted in (None, name)]
    if kind not in ("required", "any", "function", "tool") or not forced:
        raise RequestError(
            key="tool_choice",
            found=choice,
            allowed=f"auto, none, a call of any tool, or of one of {names}",
        )
    return forced


def whole_grammar(
    grammar: Grammar | None, calls: str | None, forced: bool, thoughts: str | None
) -> Grammar:
    """Return the grammar of an answer from its beginning. `calls` are the rules of calls that it
    may have, or must have if `forced`; `thoughts` is the rule of thoughts before it."""
    rules = [each for each in (thoughts, calls) if each is not None]
    parts = ["calls"] if calls is not None else []
    field = "tool_choice" if forced or grammar is None else grammar.field
    if grammar is not None and not forced:
        if not rules:
            return grammar
        parts.append("answer")
        rules.append(f"answer: {_rule(grammar)}")
    start = f"start: {'thoughts ' if thoughts else ''}({' | '.join(parts)})"
    return Grammar("grammar", "\n".join([start, *rules]), field)


def _rule(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return f"%json {grammar.text}"
    if grammar.kind == "choice":
        return " | ".join(map(json.dumps, json.loads(grammar.text)))
    if grammar.kind == "grammar":
        raise RequestError(
            "cannot follow thoughts, nor be offered beside tools",
            key=grammar.field,
            remedy="give no tools, and reasoning_effort=none if the chat template has a switch",
        )
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(grammar.text)}/"


def check_grammar(grammar: Grammar) -> None:
    """Refuse a grammar that is wrong, or needs too much work."""
    if (size := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"has {size} bytes, and at most {MAX_GRAMMAR_BYTES} are read", key=grammar.field
        )
    if fault := _fault(grammar.kind, grammar.text):
        raise RequestError(f": {fault}", key=grammar.field, remedy="give a simpler or correct one")


@lru_cache(CHECKED)
def _fault(kind: str, text: str) -> str:
    """Return what is wrong with a grammar, or ""."""
    program = [sys.executable, "-P", str(Path(__file__).with_name("grammar_check.py")), kind]
    done = subprocess.run(program, input=text.encode(), capture_output=True)
    if done.returncode < 0:
        return "it needs too much work"
    failure = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return done.stdout.decode(errors="replace") or (failure if done.returncode else "")
