# .venv/bin/python -m pytest tests/data/test_boxes.py
"""Boxes and points of a record become the text that Qwen3-VL reads, and inspect draws them."""

import functools
import io
import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatron_vlm.commands.inspect.inspection_report import collect_statistics, inspection_report
from megatron_vlm.config import load_config
from megatron_vlm.config.data_sources import parse_sources
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.batches.dataset import open_data
from megatron_vlm.data.records.formats import parse_record
from megatron_vlm.data.records.keys import UnknownKeysError
from megatron_vlm.data.records.record import Conversation
from megatron_vlm.data.tokens.boxes_as_text import write_boxes_as_text
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.data.tokens.sample_views import show_example
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.report.html import render_page
from megatron_vlm.report.terminal import print_report
from tests.support.chats import say
from tests.support.error_fields import at, raises
from tests.support.report_facts import browse, in_a_browser


@pytest.fixture(scope="module")
def reader(tiny, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("images"))

    @functools.cache
    def make(**options):
        cfg = replace(DataConfig(max_pixels=65536), **options)
        return make_reader(make_encoder(tiny(), cfg), cfg, read_sizes(tiny()), root)

    return make


def blank(width, height, kind="PNG", **options):
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height)).save(file, kind, **options)
    return file.getvalue()


def turned(width, height, orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return blank(width, height, "JPEG", exif=exif)


def record(answer, *pictures, question="Where?", **objects):
    marks = "<image>" * len(pictures)
    return {
        "messages": [say("user", marks + question), say("assistant", answer)],
        "images": list(pictures),
        "objects": objects,
    }


def written(raw, ours):
    """Return the texts of the record's messages as they are learnt, without the template."""
    ids = ours.encode(raw, "x:1").ids_S
    text = ours.encoder.renderer.tokenizer.decode(ids)
    return re.findall(r"<\|im_start\|>\w+\n(.*?)<\|im_end\|>", text, re.DOTALL)


# The three examples of ms-swift's documentation, which also gives their boxes in thousandths.
MS_SWIFT = [
    (
        record(
            "<ref-object><bbox> and <ref-object><bbox> are playing on the beach",
            (1500, 1800),
            question="Describe the image.",
            ref=["a dog", "a woman"],
            bbox=[[331.5, 761.4, 853.5, 1594.8], [676.5, 685.8, 1099.5, 1427.4]],
        ),
        "Describe the image.",
        "a dog[221, 423, 569, 886] and a woman[451, 381, 733, 793] are playing on the beach",
    ),
    (
        record(
            "<bbox><bbox>",
            (900, 800),
            question="Find the <ref-object> in the image",
            ref=["sheep"],
            bbox=[[90.9, 160.8, 135, 212.8], [360.9, 480.8, 495, 532.8]],
        ),
        "Find the sheep in the image",
        "[101, 201, 150, 266][401, 601, 550, 666]",
    ),
    (
        record(
            "Action: click(start_box='<bbox>')",
            (2500, 2000),
            question="Help me open Google Chrome",
            ref=[],
            bbox=[[615, 226]],
        ),
        "Help me open Google Chrome",
        "Action: click(start_box='[246, 113]')",
    ),
]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("max_pixels", [16384, 262144])  # the resize changes nothing
def test_ms_swifts_examples(number, max_pixels, reader):
    raw, question, answer = MS_SWIFT[number]
    raw = {**raw, "images": [blank(*size) for size in raw["images"]]}
    record_reader = reader(max_pixels=max_pixels, min_pixels=1024)
    prompt, reply = written(raw, record_reader)
    assert prompt.endswith("<|vision_end|>" + question)
    assert reply == answer


def test_the_example_of_the_docs(reader):
    page = Path(__file__).parents[2] / "docs" / "data.md"
    pattern = r"For a picture of (\d+ x \d+) pixels the answer becomes\s`(.*?)`"
    match = re.search(rf'```json\n({{"images".*?)```\s+{pattern}', page.read_text(), re.DOTALL)
    example, size, answer = match.groups()
    raw = {**json.loads(example), "images": [blank(*map(int, size.split(" x ")))]}
    prompt, reply = written(raw, reader())
    assert prompt.endswith("Find the dog.") and reply == answer


DOG = {"ref": ["a dog"], "bbox": [[20, 30, 100, 60]]}
JSON_ANSWER = '[{"bbox_2d": <bbox>, "label": "<ref-object>"}]'
JSON_LEARNT = '[{"bbox_2d": [100, 300, 500, 600], "label": "a dog"}]'
SAME = {
    "messages": lambda: record(JSON_ANSWER, "p.png", **DOG),
    "objects as JSON text": lambda: {**record(JSON_ANSWER, "p.png"), "objects": json.dumps(DOG)},
    "parts": lambda: {
        "messages": [
            say("user", {"type": "image", "image": "p.png"}, {"type": "text", "text": "Where?"}),
            say("assistant", *({"type": "text", "text": text} for text in JSON_ANSWER.split(","))),
        ],
        "objects": DOG,
    },
    "parts of the sides": lambda: record(
        JSON_ANSWER, "p.png", ref=["a dog"], bbox=[[0.1, 0.3, 0.5, 0.6]], bbox_type="norm1"
    ),
    "thousandths": lambda: record(
        JSON_ANSWER, "p.png", ref=["a dog"], bbox=[[100, 300, 500, 600]], bbox_type="norm1000"
    ),
    "with its image named": lambda: record(JSON_ANSWER, "p.png", image_id=[0], **DOG),
}


@pytest.mark.parametrize("name", SAME)
def test_every_form_is_learnt_like_the_text_written_out(name, reader):
    """Ids and targets equal those of a record that has the coordinates in its text."""
    record_reader = reader()
    Path(record_reader.policy.root, "p.png").write_bytes(blank(200, 100))
    raw = SAME[name]()
    if name == "parts":  # the comma separated the two parts
        raw["messages"][1]["content"][0]["text"] += ","
    plain = record(JSON_LEARNT, "p.png")
    expected, sample = record_reader.encode(plain, "x:1"), record_reader.encode(raw, "x:1")
    assert sample.ids_S.tolist() == expected.ids_S.tolist()
    assert sample.trained_S.tolist() == expected.trained_S.tolist()
    trained = sample.ids_S[sample.trained_S]
    assert record_reader.encoder.renderer.tokenizer.decode(trained) == JSON_LEARNT + "<|im_end|>"


@pytest.mark.parametrize(
    "box, learnt, drawn",
    [
        (
            [20, 30, 100, 60],
            '{"box_2d": [300, 100, 600, 500], "label": "a dog"}',
            (100, 300, 500, 600),
        ),
        ([20, 30], '{"point_2d": [300, 100], "label": "a dog"}', (100, 300)),
    ],
)
@pytest.mark.parametrize("is_written", [False, True])
def test_gemma_has_y_first_in_texts_alone(box, learnt, drawn, is_written, tiny):
    """What is drawn has x first again, whether it comes from `objects` or from a text."""
    answer = learnt if is_written else re.sub(r"\[.*\]", "<bbox>", learnt)
    raw = record(answer, blank(200, 100), **({} if is_written else {"ref": [], "bbox": [box]}))
    ours = make_reader(
        make_encoder(tiny(family="gemma4"), DataConfig()),
        DataConfig(),
        read_sizes(tiny(family="gemma4")),
        None,
    )
    sample = ours.encode(raw, "x:1")
    assert (
        ours.encoder.renderer.tokenizer.decode(sample.ids_S[sample.trained_S]) == learnt + "<turn|>"
    )
    shown = show_example(ours, raw, "x:1", (sample,), pictures=True)
    [view] = [piece.view for turn in shown.turns for piece in turn.pieces if piece.view]
    [outline] = view.outlines
    assert (outline.label, outline.numbers) == ("a dog", drawn) and shown.problem is None


def test_marks_are_filled_in_the_order_of_the_text(reader):
    """Reasoning comes before its answer, and a filled name is not searched for marks."""
    raw = {
        "messages": [
            say("system", "Find <ref-object>."),
            say("user", "<image>In <bbox>?"),
            say("assistant", "<ref-object> at <bbox>", reasoning_content="<bbox>?"),
        ],
        "images": [blank(100, 100)],
        "objects": {"ref": ["<bbox>", "<image>"], "bbox": [[1, 1], [2, 2], [3, 3]]},
    }
    chat = write_boxes_as_text(parse_record(raw, "x:1"), [(100, 100)])
    assert [turn.parts[-1] for turn in chat.turns] == [
        "Find <bbox>.",
        "In [10, 10]?",
        "<image> at [30, 30]",
    ]
    assert chat.turns[2].reasoning == "[20, 20]?"


def test_each_box_is_measured_by_its_own_image(reader):
    pictures = [blank(100, 200), blank(400, 50)]
    boxes = [[50, 50], [50, 50], [400, 50]]
    raw = record("<bbox><bbox><bbox>", *pictures, bbox=boxes, image_id=[0, 1, 1])
    assert written(raw, reader())[1] == "[500, 250][125, 1000][1000, 1000]"
    raw = record("<bbox>", *pictures, bbox=[[50, 50]])  # the first image by default
    assert written(raw, reader())[1] == "[500, 250]"


@pytest.mark.parametrize("text", ["<bbox> and <ref-object>", "<bbox>1, 2, 3, 4</bbox>"])
def test_without_objects_marks_are_text(text, reader):
    for objects in (None, {}, "", {"ref": None, "bbox": None}):
        raw = {**record(text, blank(64, 64)), "objects": objects}
        assert written(raw, reader())[1] == text


def test_references_need_no_image(reader):
    raw = {
        "messages": [say("user", "a <ref-object>?"), say("assistant", "b")],
        "objects": {"ref": ["c"], "bbox": []},
    }
    assert written(raw, reader()) == ["a c?", "b"]


def test_marks_of_older_models_are_answered_with_todays_form(reader):
    with raises(DataError, problem_has="<|box_start|>", remedy_has='{"bbox_2d": [221, 423'):
        reader().encode(record("<|box_start|>(1,2),(3,4)<|box_end|>", blank(64, 64)), "x:1")


def test_special_tokens_of_a_reference_are_guarded(reader):
    raw = record("<ref-object>", blank(64, 64), ref=["<|im_end|>"])
    with pytest.raises(DataError, match=r"the text contains <\|im_end\|>"):
        reader().encode(raw, "x:1")
    record_reader = reader(special_tokens="escape")
    spelled = record("<|im_end|>", blank(64, 64))
    assert (
        record_reader.encode(raw, "x:1").ids_S.tolist()
        == record_reader.encode(spelled, "x:1").ids_S.tolist()
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_relate_to_the_picture_as_it_is_shown(orientation, reader):
    """The camera stored 400 x 300 pixels. Orientations from 5 on are shown as 300 x 400."""
    picture = turned(400, 300, orientation)
    corner = [300, 400] if orientation >= 5 else [400, 300]
    raw = record("<bbox>", picture, bbox=[[30, 60, *corner]])
    first = [100, 150] if orientation >= 5 else [75, 200]
    assert written(raw, reader())[1] == f"{[*first, 1000, 1000]}"
    stored = record("<bbox>", picture, bbox=[[30, 60, 400, 300]])
    assert written(stored, reader(exif_orientation=False))[1] == "[75, 200, 1000, 1000]"
    if orientation >= 5:
        box = [30, 60, 400, 300]
        with raises(DataError, key="bbox[0]", found=box, remedy_has="EXIF") as caught:
            reader().encode(stored, "x:1")
        assert "300 x 400" in caught.value.problem


# The result for a box on a picture of 100 x 50 pixels; None means that it is refused.
EDGES = [
    ([0, 0, 100, 50], "real", [0, 0, 1000, 1000]),
    ([-1, -1, 101, 51], "real", [0, 0, 1000, 1000]),  # up to a pixel outside counts as the edge
    ([-1.01, 0, 100, 50], "real", None),
    ([0, 0, 100, 51.01], "real", None),
    ([0.25, 0.5, 12.5, 50], "real", [2, 10, 125, 1000]),  # halves round to even, as in swift
    ([100, 50], "real", [1000, 1000]),
    ([101.5, 50], "real", None),
    ([7, 7, 7, 7], "real", [70, 140, 70, 140]),
    ([0, 0, 1, 1], "norm1", [0, 0, 1000, 1000]),
    ([-0.01, 0, 1.01, 1.02], "norm1", [0, 0, 1000, 1000]),
    ([0, 0, 1.02, 1], "norm1", None),
    ([0, 0, 100, 50], "norm1", None),
    ([0, 0, 999.6, 1000], "norm1000", [0, 0, 1000, 1000]),
    ([0, 0, 1020, 1000], "norm1000", None),
    ([0.1, 0.2, 0.5, 0.9], "real", None),  # most likely parts of the sides
    ([0, 0, 1, 1], "real", None),
    ([0.5, 0.5], "real", None),
    ([0, 0], "real", [0, 0]),  # a click into the corner
    ([1, 1], "real", [10, 20]),
]


@pytest.mark.parametrize("case", EDGES)
def test_the_edges_of_a_picture(case, reader):
    box, unit, expected = case
    raw = record("<bbox>", blank(100, 50), bbox=[box], bbox_type=unit)
    if expected is not None:
        assert written(raw, reader())[1] == str(expected)
        return
    with raises(DataError, place="x:1: objects", key="bbox[0]", found=box) as error:
        reader().encode(raw, "x:1")
    assert "100 x 50" in str(error.value) or "bbox_type: norm1" in str(error.value)


@st.composite
def placed(draw):
    """Draw sizes of pictures, and boxes and points on them in parts of their sides."""
    sizes = draw(st.lists(st.tuples(*[st.integers(2, 20_000)] * 2), min_size=1, max_size=3))
    part = st.integers(0, 9973).map(lambda count: Fraction(count, 9973))
    boxes = []
    for _ in range(draw(st.integers(1, 5))):
        corners = [draw(st.tuples(part, part)) for _ in range(draw(st.integers(1, 2)))]
        xs, ys = (sorted(side) for side in zip(*corners, strict=True))
        box = [c for corner in zip(xs, ys, strict=True) for c in corner]
        boxes.append((box, draw(st.integers(0, len(sizes) - 1))))
    return sizes, boxes


@settings(max_examples=150)
@given(placed())
@pytest.mark.full
def test_coordinates_are_the_nearest_thousandths(case):
    """The reference is exact fractions, for each unit. Boxes keep their order and stay inside."""
    sizes, boxes = case
    for unit in ("real", "norm1", "norm1000"):
        given_boxes, exact = [], []
        for box, image in boxes:
            height, width = sizes[image]
            ends = {"real": (width, height), "norm1": (1, 1), "norm1000": (1000, 1000)}[unit]
            numbers = [float(part * ends[i % 2]) for i, part in enumerate(box)]
            if unit == "real" and max(numbers) <= 1:
                return  # refused: see the edges
            given_boxes.append(numbers)
            exact.append([1000 * Fraction(n) / ends[i % 2] for i, n in enumerate(numbers)])
        raw = record(
            "|".join(["<bbox>"] * len(boxes)),
            *["a.png"] * len(sizes),
            bbox=given_boxes,
            bbox_type=unit,
            image_id=[image for _, image in boxes],
        )
        chat = write_boxes_as_text(parse_record(raw, "x:1"), sizes)
        coordinates = [json.loads(text) for text in chat.turns[1].parts[0].split("|")]
        for numbers, nearest in zip(coordinates, exact, strict=True):
            for number, fraction in zip(numbers, nearest, strict=True):
                assert type(number) is int and 0 <= number <= 1000
                assert abs(number - fraction) <= Fraction(1, 2) + Fraction(1, 10**9)
            if len(numbers) == 4:
                assert numbers[0] <= numbers[2] and numbers[1] <= numbers[3]


P = "p.png"
NAN, FAR = math.nan, 10**400
# The answer, its objects, and the key and the words of the refusal.
WRONG_OBJECTS = [
    ("<bbox><bbox>", {"bbox": [[5, 5]]}, "bbox", "1 values for the 2 <bbox>"),
    ("<bbox>", {"bbox": [[5, 5], [6, 6]]}, "bbox", "2 values for the 1 <bbox>"),
    ("<bbox>", {"ref": [], "bbox": []}, "bbox", "0 values for the 1 <bbox>"),
    ("<ref-object><bbox>", {"bbox": [[5, 5]]}, "ref", "0 values for the 1 <ref-object>"),
    ("<bbox>", {"ref": ["a"], "bbox": [[5, 5]]}, "ref", "0 <ref-object> marks"),
    ("<bbox>", {"bbox": [[1, 2, 3]]}, "bbox[0]", "a list of 3"),
    ("<bbox>", {"bbox": [[]]}, "bbox[0]", "a list of 0"),
    ("<bbox>", {"bbox": [1, 2, 3, 4]}, "bbox[0]", "an int"),
    ("<bbox>", {"bbox": "1,2"}, "bbox", "a str"),
    ("<bbox><bbox>", {"bbox": [[5, 5], "5, 5"]}, "bbox[1]", "a str"),
    ("<bbox>", {"bbox": [[NAN, 5]]}, "bbox[0]", "nan"),
    ("<bbox>", {"bbox": [[5, -math.inf]]}, "bbox[0]", "a coordinate that is -inf"),
    ("<bbox>", {"bbox": [[5, FAR]]}, "bbox[0]", "a coordinate that is an int"),
    ("<bbox>", {"bbox": [["5", 5]]}, "bbox[0]", "a coordinate that is a str"),
    ("<bbox>", {"bbox": [[True, 5]]}, "bbox[0]", "a coordinate that is a bool"),
    ("<bbox>", {"bbox": [[None, 5]]}, "bbox[0]", "a coordinate that is null"),
    ("<bbox>", {"bbox": [[9, 5, 8, 6]]}, "bbox[0]", "=[9,5,8,6]"),
    ("<bbox>", {"bbox": [[5, 9, 6, 8]]}, "bbox[0]", "=[5,9,6,8]"),
    ("<bbox>", {"bbox": [[5, 5]], "bbox_type": "yolo"}, "bbox_type", "=yolo"),
    ("<bbox>", {"bbox": [[5, 5]], "bbox_type": ["real"]}, "bbox_type", "=[real]"),
    ("<bbox>", {"bbox": [[5, 5]], "image_id": [1]}, "image_id[0]", "=1"),
    ("<bbox>", {"bbox": [[5, 5]], "image_id": [-1]}, "image_id[0]", "=-1"),
    ("<bbox>", {"bbox": [[5, 5]], "image_id": ["0"]}, "image_id[0]", "=0"),
    ("<bbox>", {"bbox": [[5, 5]], "image_id": [0.0]}, "image_id[0]", "=0.0"),
    ("<bbox><bbox>", {"bbox": [[5, 5]] * 2, "image_id": [0]}, "image_id", "1 entries for 2 boxes"),
    ("<bbox>", {"bbox": [[5, 5]], "image_id": 0}, "image_id", "an int"),
    ("<ref-object>", {"ref": [3]}, "ref[0]", "an int"),
    ("<ref-object>", {"ref": "a dog"}, "ref", "a str"),
]


@pytest.mark.parametrize(("answer", "objects", "key", "words"), WRONG_OBJECTS)
def test_wrong_objects_are_refused_by_name(answer, objects, key, words):
    with raises(DataError, place="a:7: objects", key=key) as caught:
        parse_record(record(answer, P, **objects), "a:7")
    assert words in str(caught.value)


REFUSED = {
    "a text without images": (
        record("<bbox>", bbox=[[5, 5]], bbox_type="norm1"),
        at("objects", "bbox", "1 boxes and no images"),
    ),
    "a video": (
        {
            "messages": [say("user", "<video>Where?"), say("assistant", "<bbox>")],
            "videos": [["a.png", "b.png"]],
            "objects": {"bbox": [[0.5, 0.5]], "bbox_type": "norm1"},
        },
        at("objects", "bbox", "1 boxes and no images"),
    ),
    "a list of boxes": (
        {**record("<bbox>", P), "objects": [[5, 5]]},
        at("objects[0]", has="a list"),
    ),
    "a number": ({**record("<bbox>", P), "objects": 0}, at("", "objects", "an int")),
    "no JSON": ({**record("<bbox>", P), "objects": "{"}, at("", "objects", "JSON")),
    "of a detection set": (
        record("<bbox>", P, bbox=[[5, 5]], categories=[1]),
        at(has="'categories' (objects)", kind=UnknownKeysError),
    ),
    "in a tool call": (
        {
            "messages": [
                say("user", "<image>Click <bbox>."),
                say(
                    "assistant",
                    tool_calls=[{"function": {"name": "f", "arguments": {"at": ["<bbox>"]}}}],
                ),
            ],
            "images": [P],
            "objects": {"bbox": [[5, 5]]},
        },
        at("message 1", "tool_calls"),
    ),
    "beside chunks": (
        {"chunks": [{"tokens": [1]}], "objects": {"bbox": [[5, 5]]}},
        at(has="'objects'", kind=UnknownKeysError),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_name(name):
    raw, fields = REFUSED[name]
    with raises(**{"kind": DataError} | fields):
        parse_record(raw, "a:7")


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from([FAR, -FAR, "<bbox>", "real", b"x"]),
        st.integers(4300, 5000).map(lambda digits: 10**digits),  # Python does not print them
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.sampled_from(["ref", "bbox", "bbox_type", "image_id"]), inner),
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(JUNK, st.one_of(JUNK, st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=4))))
def test_whatever_objects_holds_it_is_a_chat_or_a_sentence(value, boxes):
    for objects in (value, {"bbox": boxes}, {"bbox": boxes, "image_id": value}):
        raw = {**record("<bbox><bbox> <ref-object>", "a.png"), "objects": objects}
        try:
            chat = write_boxes_as_text(parse_record(raw, "x:1"), [(50, 100)])
        except DataError as error:
            assert str(error).startswith("x:1: ")
        else:
            assert isinstance(chat, Conversation) and chat.objects is None


@pytest.fixture
def look(tiny, tmp_path):
    """Return look(records...), which returns the inspection of the records, with pictures."""

    def make(*records):
        path = tmp_path / "look.jsonl"
        path.write_text("".join(json.dumps(raw) + "\n" for raw in records))
        settings = (f"data.train={path}", f"model.path={tiny()}", "data.num_workers=0")
        cfg = load_config([*settings, f"data.cache_dir={tmp_path / 'cache'}"])
        data = open_data(cfg.data.train, "data.train", cfg.data, cfg.model.path, read_sizes(tiny()))
        return collect_statistics(cfg, data, range(len(records)), 1, True)

    return make


def rendered(inspection):
    return render_page(inspection_report(inspection))


def drawn(inspection):
    """Return the boxes and points of each figure with style and label, and its caption."""
    figures = re.findall(
        r'<figure class="outlined">(.*?)</figure>', rendered(inspection), re.DOTALL
    )
    shape = re.compile(
        r'<u class="(\w+) c\d( right)?" style="(.*?)" title="(.*?)">(?:<b>(.*?)</b>)?'
    )
    return [(shape.findall(text), re.findall(r"<figcaption>(.*?)<", text)[0]) for text in figures]


def printed(inspection):
    console = Console(file=io.StringIO(), width=400, highlight=False)
    print_report(inspection_report(inspection), console)
    return console.file.getvalue()


def on(x, y, width, height):
    return f"left:{x}%;top:{y}%;width:{width}%;height:{height}%"


def test_inspect_draws_boxes_on_their_images(look, tmp_path):
    (tmp_path / "a.png").write_bytes(blank(200, 100))
    (tmp_path / "b.png").write_bytes(blank(100, 400))
    answer = '[{"bbox_2d": <bbox>, "label": "a <b>"}] <bbox> <bbox>'
    boxes = [[20, 30, 100, 60], [50, 300], [0, 0, 99, 400]]
    raw = record(answer, "a.png", "b.png", bbox=boxes, image_id=[0, 1, 1])
    inspection = look(raw, {**raw, "objects": {**raw["objects"], "ref": []}})
    one = ("box", "", on("10.00", "30.00", "40.00", "30.00"), "a &lt;b&gt; [100, 300, 500, 600]")
    point = ("point", "", on("50.00", "75.00", "0.00", "0.00"), "[500, 750]", "")
    other = ("box", "", on("0.00", "0.00", "99.00", "100.00"), "[0, 0, 990, 1000]", "")
    assert drawn(inspection)[:2] == [
        ([(*one, "a &lt;b&gt;")], "image 0 \u00b7 192 x 96 \u00b7 a.png \u00b7 1 box"),
        ([point, other], "image 1 \u00b7 96 x 384 \u00b7 b.png \u00b7 1 box, 1 point"),
    ]
    lines = printed(inspection)
    assert "image 0: a <b> [100, 300, 500, 600] " in lines
    assert "image 1: [500, 750]; [0, 0, 990, 1000] " in lines


def labels(inspection):
    return [[(title, label) for *_, title, label in shapes] for shapes, _ in drawn(inspection)]


def test_boxes_are_labelled_by_their_references(look, tmp_path):
    """Names and boxes of equal number are pairs, and a single name belongs to all boxes."""
    (tmp_path / "a.png").write_bytes(blank(100, 100))
    both, boxes = ["cat", "dog"], [[60, 60, 90, 90], [10, 20]]
    inspection = look(
        record("<ref-object><bbox><ref-object><bbox>", "a.png", ref=both, bbox=boxes),
        record("<ref-object><bbox><bbox>", "a.png", ref=["cat"], bbox=boxes),
        record("<ref-object><ref-object><bbox>", "a.png", ref=both, bbox=boxes[:1]),
    )
    assert labels(inspection) == [
        [("cat [600, 600, 900, 900]", "cat"), ("dog [100, 200]", "dog")],
        [("cat [600, 600, 900, 900]", "cat"), ("cat [100, 200]", "cat")],
        [("[600, 600, 900, 900]", "")],
    ]
    # A label is on the side that has room.
    assert [side for _, side, *_ in drawn(inspection)[0][0]] == [" right", ""]


def test_json_of_the_text_is_drawn_and_left_as_it_is(look, tmp_path):
    """In the form of Qwen's cookbook, a box does not name one of several images."""
    (tmp_path / "a.png").write_bytes(blank(100, 100))
    answer = (
        '```json\n[\n\t{"bbox_2d": [100, 200, 350, 600], "label": "ball", "team": "a"},\n'
        '\t{"point_2d": [8, 7.5], "label": 3}, {"bbox_2d": "x"}, {"bbox_2d": [1, NaN, 2, 3]},'
        ' {"point_2d": [1, 2}, {"bbox_2d": [[[' + "[" * 3000 + "}]\n```"
    )
    plain = record(answer, "a.png")
    inspection = look(plain, record(answer, "a.png", "a.png"))
    expected = [("ball [100, 200, 350, 600]", "ball"), ("[8, 7.5]", "")]
    assert labels(inspection) == [expected, [], []]
    assert answer in "".join(piece.text for piece in inspection.shown[0].turns[-1].pieces)
    assert inspection.shown[0].problem is None


def test_pixels_in_the_text_are_told(look, tmp_path):
    """The example is in the README of Qwen's own fine-tuning code."""
    (tmp_path / "a.png").write_bytes(blank(640, 480))
    inspection = look(record('{\n"bbox_2d": [135, 114, 1016, 672]\n}', "a.png"))
    message = f"{tmp_path}/look.jsonl:1: a box in the text has 1016, above 1000"
    assert message in printed(inspection) and message in rendered(inspection)


@pytest.mark.parametrize(
    ("answer", "box"),
    [
        ('{"bbox_2d": [0.1, .25, 0.35, 1], "label": "ball"}', "[0.1, .25, 0.35, 1]"),
        ("at (0.0,0.5,1.0,1.0)", "(0.0,0.5,1.0,1.0)"),
        ("[0, 0, 1, 1]", None),  # thousandths
        ("[0.1, 0.2, 0.3]", None),
        ("[0.1, 0.2, 35.5, 60]", None),
    ],
)
def test_parts_of_a_picture_in_the_text_are_counted(answer, box, tiny, tmp_path):
    """A record without a picture has no boxes, and a wrong record is skipped."""
    (tmp_path / "a.png").write_bytes(blank(64, 48))
    records = [record(answer, "a.png"), record(answer), record("[1, 2, 3, 4]", "a.png"), {}]
    path = tmp_path / "parts.jsonl"
    path.write_text("".join(json.dumps(raw) + "\n" for raw in records))
    cfg = DataConfig(cache_dir=None, num_workers=0, max_errors=1)
    sources = parse_sources(str(path), "data.train")
    data = open_data(sources, "data.train", cfg, tiny(), read_sizes(tiny()))
    said = [line for line in Remarks.from_data(data, "data.train", cfg).lines if "boxes" in line]
    if box is None:
        assert said == []
    else:
        assert len(said) == 1 and "1 of the first 3 records have boxes of 0 to 1" in said[0]
        assert f"such as {box}: " in said[0] and "bbox_type: norm1" in said[0]


def test_boxes_of_images_that_were_cut_off_are_not_drawn_elsewhere(reader):
    pictures = [blank(64, 64), blank(64, 64)]
    raw = record("<bbox>", *pictures, bbox=[[32, 32]], image_id=[1])
    raw["messages"][0]["content"] = "<image><video>a"
    raw["videos"] = [[blank(64, 64)] * 4]
    raw["messages"] += [say("user", "<image><bbox>"), say("assistant", "b")]
    raw["objects"]["bbox"] *= 2
    raw["objects"]["image_id"] *= 2
    record_reader = reader(truncation="image_safe", max_images=1)
    views_of_sample = show_example(
        record_reader, raw, "x:1", record_reader.encode_example(raw, "x:1"), pictures=True
    )
    views = [piece.view for turn in views_of_sample.turns for piece in turn.pieces if piece.view]
    assert [view.label for view in views][:2] == ["image 0", "video 0, frames 0 and 1"]
    assert not any(view.outlines for view in views)


def test_a_picture_that_has_gone_is_told(reader):
    record_reader = reader()
    path = Path(record_reader.policy.root, "gone.png")
    path.write_bytes(blank(64, 64))
    raw = record("<bbox>", "gone.png", bbox=[[32, 32]])
    example = record_reader.encode_example(raw, "x:1")
    path.unlink()
    view = show_example(record_reader, raw, "x:1", example, pictures=False)
    assert view.problem.startswith("x:1: image 0: no file gone.png")


@in_a_browser
@pytest.mark.full
def test_a_browser_draws_the_box_where_it_is(look, tmp_path):
    PIL.Image.new("RGB", (256, 256), (1, 2, 3)).save(tmp_path / "a.png")
    inspection = look(record("<bbox>", "a.png", bbox=[[0.25, 0.5, 0.75, 0.9]], bbox_type="norm1"))
    page, shot = tmp_path / "page.html", tmp_path / "shot.png"
    page.write_text(rendered(inspection), encoding="utf-8")
    browse(page, "--window-size=900,1500", f"--screenshot={shot}")
    with PIL.Image.open(shot) as opened:
        pixels = np.asarray(opened.convert("RGB"))

    def extent(colour):
        rows, columns = (pixels == colour).all(axis=-1).nonzero()
        return np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])

    left, top, right, bottom = extent((1, 2, 3))
    width, height = right - left, bottom - top
    assert width == height == 256
    box = np.array([0.25 * width, 0.5 * height, 0.75 * width, 0.9 * height])
    assert np.abs(extent((255, 111, 97)) - [left, top, left, top] - box).max() <= 1
