# .venv/bin/python -m pytest tests/rl/test_turn_tokens.py
"""Answers go back into a conversation as text: wherever one was cut, and whatever it spells, the
next prompt is what Hugging Face's template shows, and no mark in an answer forges anything."""

import re
import shutil
from pathlib import Path

import pytest

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.family import read_sizes
from megatron_vlm.rl.turn_tokens import TurnEncoder
from tests.data.test_gemma4_chats import NAMES, released
from tests.support.chats import call, hf_encode, hf_processor, image, say, text
from tests.support.gemma4_chats import gemma_ids

TEMPLATES = Path(__file__).parents[1] / "support" / "templates"
THINKING = {"enable_thinking": True}
LOOK = call("look", x="a")
ASK, NEXT = say("user", image(32, 32), text("Red?")), say("user", image(32, 64), text("And?"))
RESULT = say("tool", text("3"), image(32, 64))
CALL = '<|tool_call>call:look{x:<|"|>a<|"|>}<tool_call|>'
OPENED, CLOSED = "<|channel>thought\n", "\n<channel|>"
# What Gemma draws: thoughts, a call, thoughts that come late, and a mark that closes nothing.
LATE = f"{OPENED}no{CLOSED}red<channel|>."
DRAWN = {
    "a call": (f"{OPENED}what{CLOSED}So {CALL} {LATE}", RESULT),
    "words": (f"{OPENED}what{CLOSED}So {LATE}", NEXT),
}
QWEN = (
    "what\n</think>\n\nSo <tool_call>\n<function=look>\n</function>\n</tool_call>"
    "<think>\nno\n</think>\n\nred</think>."
)


@pytest.fixture(scope="module")
def encoder(tiny, tmp_path_factory):
    """Return `make`: the encoder and the folder of a tiny checkpoint with this template."""
    root = tmp_path_factory.mktemp("answers")

    def make(family, template=None, **options):
        path = Path(tiny(family="gemma4") if family == "gemma4" else tiny())
        if template is not None:
            folder = root / str(hash(template))
            shutil.copytree(path, folder, dirs_exist_ok=True)
            (folder / "chat_template.jinja").write_text(template)
            path = folder
        cfg = DataConfig(**options)
        reader = make_reader(make_encoder(str(path), cfg), cfg, read_sizes(str(path)), "")
        return TurnEncoder(reader), str(path)

    return make


def conversation(turns, *replies):
    """Return a function that returns the prompt after these answers, each with its reply."""
    opening, first = turns.opening([ASK], "x:1"), turns.parse_opening([ASK], "x:1", {})
    rows = [opening, *(turns.reply([reply], "x:1")[0] for reply in replies)]
    told = [turns.parse_reply([reply], "x:1") for reply in replies]

    def prompt_after(*answers):
        ids, said = opening.ids_S.tolist(), []
        for number, answer in enumerate(answers):
            said += [turns.answer(ids, answer), *told[number]]
            ids = turns.conversation(first, said, rows[: number + 2], "x:1")
        return ids

    return prompt_after


def cuts(turns, drawn):
    """Return the text of an answer that is cut before each of its tokens."""
    renderer = turns.prompts.encoder.renderer
    ids = renderer.tokenizer(drawn, add_special_tokens=False).input_ids
    return [renderer.answer_text(ids[:end]) for end in range(len(ids) + 1)]


def check(turns, ids, expected):
    """Compare the words of two prompts, and the tokens that make turns and pictures."""
    renderer = turns.prompts.encoder.renderer
    assert renderer.tokenizer.decode(ids) == renderer.tokenizer.decode(expected)
    named = renderer.chat_format.marks
    makes = {renderer.id_of[each] for each in (named.start, named.end, named.image, named.video)}
    makes |= {renderer.start_id, *renderer.end_ids}
    assert [id for id in ids if id in makes] == [id for id in expected if id in makes]


def gemma_answer(answer):
    """Return an answer for transformers' template, which itself cuts thoughts out of its words."""
    words, found, _ = answer.partition(CALL)
    if not found:
        return say("assistant", answer)
    thoughts, closes, _ = words.removeprefix(OPENED).partition(CLOSED)
    return say("assistant", words, tool_calls=[LOOK], **{"reasoning": thoughts} if closes else {})


def check_gemma(turns, folder, drawn, reply, **variables):
    prompt_after = conversation(turns, reply)
    for answer in cuts(turns, drawn):
        said = gemma_answer(answer)
        # Templates leave out a result that no call has asked for: it is a message of the user.
        told = reply if "tool_calls" in said else {**reply, "role": "user"}
        chat = {"messages": [ASK, said, told]}
        expected = gemma_ids(folder, chat, add_generation_prompt=True, **variables)
        check(turns, prompt_after(answer), expected)


@pytest.mark.parametrize("name", DRAWN)
def test_answers_of_gemma_that_are_cut(name, encoder):
    drawn, reply = DRAWN[name]
    turns, folder = encoder("gemma4", template_kwargs=THINKING)
    check_gemma(turns, folder, drawn, reply, **THINKING)


@pytest.mark.slow
@pytest.mark.engine("trl")
@pytest.mark.parametrize("name", NAMES)
def test_answers_in_the_released_templates_of_gemma(name, encoder):
    turns, folder = encoder("gemma4", released(name), template_kwargs=THINKING)
    for drawn, _ in DRAWN.values():
        for reply in (NEXT, say("tool", "3")):
            check_gemma(turns, folder, drawn, reply, **THINKING)


def test_thoughts_that_the_prompt_after_a_result_opens(encoder):
    """An answer closes them, goes on within them where it is cut, or opens them once more."""
    turns, folder = encoder("gemma4", template_kwargs=THINKING)
    prompt_after = conversation(turns, RESULT, NEXT)
    for answer in cuts(turns, f"what{CLOSED}red"):
        words = answer.partition(CLOSED)[2]
        messages = [ASK, say("assistant", "", tool_calls=[LOOK]), RESULT, say("assistant", words)]
        chat = {"messages": [*messages, NEXT]}
        expected = gemma_ids(folder, chat, add_generation_prompt=True, **THINKING)
        check(turns, prompt_after(CALL, answer), expected)


# Of each template: whether it cuts thoughts out of earlier answers, how a prompt ends, variables.
CUTS = {
    "qwen3_vl": (False, "", {}),
    "qwen3_5": (True, "<think>\n", {}),
    "qwen3_5_small": (True, "", {}),
    "qwen3_6": (True, "<think>\n", {}),
    "qwen3_8": (True, "<think>\n", {"preserve_thinking": False}),
}


@pytest.mark.parametrize("name", CUTS)
def test_answers_of_qwen_that_are_cut(name, encoder):
    does_cut, opened, variables = CUTS[name]
    template = None if name == "qwen3_vl" else (TEMPLATES / f"{name}.jinja").read_text()
    turns, folder = encoder("qwen", template, template_kwargs=variables)
    prompt_after, processor = conversation(turns, NEXT), hf_processor(folder)
    for answer in cuts(turns, QWEN if opened else f"<think>\n{QWEN}"):
        words = opened + answer
        if does_cut:  # all up to the last mark, and the block at the end that has none
            words = re.sub(r"<think>(?!.*</think>).*", "", words, flags=re.DOTALL)
            words = words.rpartition("</think>")[2].lstrip("\n")
        chat = {"messages": [ASK, say("assistant", words), NEXT]}
        expected = hf_encode(processor, chat, add_generation_prompt=True, **variables)
        check(turns, prompt_after(answer), expected["input_ids"][0].tolist())


@pytest.mark.parametrize(("depth", "is_call"), [(40, True), (200, False), (600, False)])
def test_a_call_with_more_lists_in_lists_than_a_template_shows_is_text(depth, is_call, encoder):
    turns, _ = encoder("gemma4")
    drawn = CALL.replace('<|"|>a<|"|>', depth * "[" + depth * "]")
    ids = conversation(turns, RESULT)(drawn)
    renderer = turns.prompts.encoder.renderer
    assert drawn in renderer.tokenizer.decode(ids)
    assert (renderer.id_of["<|tool_call>"] in ids) == is_call


@pytest.mark.parametrize("family", ["gemma4", "qwen"])
def test_an_answer_that_spells_marks_is_text(family, encoder):
    template = None if family == "gemma4" else (TEMPLATES / "qwen3_5.jinja").read_text()
    turns, _ = encoder(family, template, template_kwargs={"enable_thinking": False})
    renderer, prompt_after = turns.prompts.encoder.renderer, conversation(turns, NEXT)
    thoughts = {"<|channel>", "<channel|>"}
    spelled = [each for each in sorted(renderer.id_of) if each not in thoughts]
    ids, plain = prompt_after(f"a {' '.join(spelled)} b"), prompt_after("a c b")
    words = [renderer.tokenizer.decode(each) for each in (ids, plain)]
    assert words[0] == words[1].replace("a c b", f"a {' '.join(spelled)} b")
    special = set(renderer.tokenizer.all_special_ids) | set(renderer.id_of.values())
    assert [id for id in ids if id in special] == [id for id in plain if id in special]
