# .venv/bin/python -m pytest tests/data/test_thinking.py
"""Reasoning goes through the checkpoint's template: ids equal transformers', what is trained is
what is shown, and what a template would leave out altogether is refused."""

import inspect
from dataclasses import replace

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_vlm.config.checks import TEMPLATE_ARGUMENTS
from megatron_vlm.config.load import load_config
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from tests.data.test_chat_template import trained_text
from tests.support.chats import hf_encode, hf_processor, say
from tests.support.error_fields import raises

# In the manner of Qwen3-VL's Thinking templates: thoughts are taken from their own field or from
# the text, and shown in answers to the last question only.
THINKING = """
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > asked.last %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}
"""


@pytest.fixture(scope="module")
def thinking(tiny, tmp_path_factory):
    """The tiny checkpoint's tokenizer with that template, and readers of it."""
    folder = tmp_path_factory.mktemp("thinking")
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    tokenizer.chat_template = THINKING

    def make(**options):
        cfg = replace(DataConfig(), **options)
        encoder = make_encoder(tiny(), replace(cfg, template_kwargs={}))
        kind = type(encoder.renderer)
        encoder.renderer = kind(tokenizer, encoder.renderer.chat_format, cfg.template_kwargs)
        return make_reader(encoder, cfg, read_sizes(tiny()), str(folder))

    processor = hf_processor(tiny())
    processor.tokenizer = tokenizer
    return make, processor


THOUGHTS = {"reasoning_content": "Round and red.\nA dot."}
CALL = [{"type": "function", "function": {"name": "count", "arguments": {}}}]
RECORDS = {
    "its own field": (
        [say("user", "What?"), say("assistant", "A dot.", **THOUGHTS)],
        ["<think>\nRound and red.\nA dot.\n</think>\n\nA dot.<|im_end|>"],
    ),
    "in the text": (
        [say("user", "What?"), say("assistant", "<think>\nRound.\n</think>\n\nA dot.")],
        ["<think>\nRound.\n</think>\n\nA dot.<|im_end|>"],
    ),
    "none": (
        [say("user", "What?"), say("assistant", "A dot.")],
        ["<think>\n\n</think>\n\nA dot.<|im_end|>"],
    ),
    "only that of the last question is shown": (
        [
            say("user", "One?"),
            say("assistant", "Two.", reasoning_content="Early."),
            say("user", "Three?"),
            say("assistant", "Let me see.", reasoning_content="First.", tool_calls=CALL),
            say("tool", "3"),
            say("assistant", "Four.", reasoning_content="Second."),
        ],
        [
            "Two.<|im_end|>",
            "<think>\nFirst.\n</think>\n\nLet me see.\n<tool_call>\n"
            '{"name": "count", "arguments": {}}\n</tool_call><|im_end|>',
            "<think>\nSecond.\n</think>\n\nFour.<|im_end|>",
        ],
    ),
    "of earlier answers alone": (
        [
            say("user", "One?"),
            say("assistant", "Two.", reasoning_content="Early."),
            say("user", "Three?"),
            say("assistant", "Four."),
        ],
        ["Two.<|im_end|>", "<think>\n\n</think>\n\nFour.<|im_end|>"],
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_ids_equal_the_template_and_what_is_shown_is_trained(name, thinking):
    make, processor = thinking
    messages, trained = RECORDS[name]
    expected = hf_encode(processor, {"messages": messages})["input_ids"][0].tolist()
    ours = make()
    sample = ours.encode({"messages": messages}, "x:1")
    assert sample.ids_S.tolist() == expected
    assert trained_text(ours, sample) == trained
    last = make(train_on="last_assistant")
    assert trained_text(last, last.encode({"messages": messages}, "x:1")) == trained[-1:]


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "A.", "reasoning": "R."},
        {"role": "assistant", "content": "A.", "thinking": "R.", "reasoning_content": "R."},
        {"from": "gpt", "value": "A.", "thinking": "R."},
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "value": "R."}, {"type": "text", "value": "A."}],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "R."}, "A."]},
    ],
)
def test_every_spelling_of_reasoning_is_the_same(answer, thinking):
    ours = thinking[0]()
    plain = say("assistant", "A.", reasoning_content="R.")
    samples = [
        ours.encode({"messages": [say("user", "a"), message]}, "x:1") for message in (answer, plain)
    ]
    assert samples[0].ids_S.tolist() == samples[1].ids_S.tolist()


THINKS = {"messages": [say("user", "a"), say("assistant", "b", reasoning_content="c")]}


def test_reasoning_that_the_template_does_not_show_is_refused(tiny, tmp_path):
    def reader(**options):
        cfg = DataConfig(**options)
        return make_reader(make_encoder(tiny(), cfg), cfg, read_sizes(tiny()), str(tmp_path))

    with raises(DataError, place="x:1", key="reasoning_content", remedy_has="Thinking") as e:
        reader().encode(THINKS, "x:1")
    names = str(e.value).rpartition("data.ignore_keys=[")[2].rstrip("]").split(",")
    ignoring = reader(ignore_keys=tuple(names))
    part = {"role": "assistant", "content": [{"type": "reasoning", "value": "c"}, "b"]}
    for answer in (THINKS["messages"][1], part):
        sample = ignoring.encode({"messages": [say("user", "a"), answer]}, "x:1")
        assert trained_text(ignoring, sample) == ["b<|im_end|>"]


def test_only_an_assistant_thinks(thinking):
    record = {"messages": [say("user", "a", reasoning="c"), say("assistant", "b")]}
    with pytest.raises(DataError, match=r"x:1: message 0: reasoning is in a message of role user"):
        thinking[0]().encode(record, "x:1")


def test_special_tokens_in_reasoning_cannot_forge(thinking):
    record = {"messages": [say("user", "a"), say("assistant", "b", thinking="<|im_end|>")]}
    with raises(DataError, place="x:1", problem_has="<|im_end|>", remedy_has="=escape"):
        thinking[0]().encode(record, "x:1")
    ours = thinking[0](special_tokens="escape")
    assert trained_text(ours, ours.encode(record, "x:1")) == [
        "<think>\n<|im_end|>\n</think>\n\nb<|im_end|>"
    ]


def test_the_prompt_opens_a_block_that_is_trained_all_the_same(thinking):
    """This template has no switch, and answers are trained as they are shown."""
    make, processor = thinking
    record = {"messages": [say("user", "a")]}
    expected = hf_encode(processor, record, add_generation_prompt=True)["input_ids"][0].tolist()
    prompt = make().encode(record, "x:1", prompt=True).ids_S.tolist()
    assert prompt == expected and processor.tokenizer.decode(prompt).endswith("<think>\n")
    assert trained_text(make(), make().encode(THINKS, "x:1")) == [
        "<think>\nc\n</think>\n\nb<|im_end|>"
    ]


def test_a_variable_that_the_template_does_not_read_is_refused(thinking):
    with raises(ConfigError, key="data.template_kwargs.enable_thinkin", found=False):
        thinking[0](template_kwargs={"enable_thinkin": False})


@pytest.mark.full
def test_what_is_ours_to_say_is_refused():
    given = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert given - {"self", "kwargs"} <= TEMPLATE_ARGUMENTS
    overrides = ["model.path=x", "data.template_kwargs={enable_thinking: false, level: [1, high]}"]
    cfg = load_config(overrides)
    assert cfg.data.template_kwargs == {"enable_thinking": False, "level": [1, "high"]}
    for name in ("tools", "messages", "tokenize", "add_generation_prompt"):
        with raises(ConfigError, key=f"data.template_kwargs.{name}"):
            load_config(["model.path=x", f"data.template_kwargs={{{name}: null}}"])
    with raises(ConfigError, key="data.template_kwargs", found="no"):
        load_config(["model.path=x", "data.template_kwargs=no"])
    cleared = load_config([*overrides, "~data.template_kwargs"])
    assert cleared.data.template_kwargs == load_config(["model.path=x"]).data.template_kwargs == {}
