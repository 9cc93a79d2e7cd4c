# .venv/bin/python -m pytest tests/commands/test_inspect_command.py
"""`inspect` shows the input of the model: tokens, trained tokens, pictures and figures."""

import base64
import io
import json
import math
import re
import statistics
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
from rich.console import Console

from megatron_vlm.commands.inspect.command import run_inspect
from megatron_vlm.commands.inspect.inspection_report import (
    Column,
    collect_statistics,
    column_figure,
    inspection_report,
)
from megatron_vlm.config import load_config
from megatron_vlm.data.batches.balance import Limits, group_cost, plan_batch
from megatron_vlm.data.batches.dataset import open_data
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.qwen.chat import CHAT
from megatron_vlm.family.qwen.images import ImageSettings
from megatron_vlm.family.qwen.videos import VideoSettings
from megatron_vlm.family.video_plan import VideoPlan
from megatron_vlm.report.charts import bins
from megatron_vlm.report.html import draw_parts, script_of
from megatron_vlm.report.sections import Bars, Listing, Marked, OutlinedPictures, Styled
from megatron_vlm.report.terminal import print_report
from tests.support.chats import CHATS, data_uri, image, picture, say, text
from tests.support.error_fields import raises
from tests.support.report_facts import Facts, Page, check_self_contained
from tests.support.tables import in_one_test

PINK = (200, 30, 120)
SCRIPT = "<script>alert(1)</script> & caf\u00e9 \u4e09 \U0001f642 [bold]x[/bold] \x1b[2J\u202e"
RECORDS = {
    **CHATS,
    "script": {"messages": [say("user", SCRIPT), say("assistant", SCRIPT)]},
    "spelled": {"messages": [say("user", "<|im_end|>"), say("assistant", "<|image_pad|>")]},
    "solid": {"messages": [say("user", {"type": "image", "image": "pink.png"}), say("tool", "t")]},
    "video": {
        "messages": [
            say("user", {"type": "video", "video": [f"{i}.png" for i in range(5)], "fps": 2}),
            say("assistant", "It rolls."),
        ]
    },
    "chunks": {
        "chunks": [
            {"tokens": [300, 301]},
            {"type": "image", "image": data_uri(64, 64)},
            {"type": "image", "image": data_uri(40, 90, 3)},
            {"tokens": [302, 303]},
        ],
        "mask": [0, 0, *[0] * 7, 0, 1],
    },
    "too long": {"messages": [say("user", "far " * 2000), say("assistant", "too long")]},
    "wrong": {"messages": [say("judge", "x")]},
    "wrong too": {"messages": [say("user", image(64, 64)), say("assistant", "<b>")], "tools": "<i"},
}
RECORDS["solid"]["messages"].append(say("assistant", "Pink."))
SHOWN = [name for name in RECORDS if name not in ("too long", "wrong", "wrong too")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    PIL.Image.new("RGB", (100, 60), PINK).save(folder / "pink.png")
    for number in range(5):
        picture(64, 64, 10 + number).save(folder / f"{number}.png")
    lines = [json.dumps(record) + "\n" for record in RECORDS.values()]
    (folder / "mixed.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def overrides(folder, tiny):
    def make(*more, train=None):
        return [
            f"data.train={train or folder / 'mixed.jsonl'}",
            f"model.path={tiny()}",
            f"data.cache_dir={folder / 'cache'}",
            *("data.max_errors=100", "data.truncation=drop", "data.max_tokens=1024"),
            *("data.special_tokens=escape", "data.num_workers=0", *more),
        ]

    return make


@pytest.fixture(scope="module")
def look(overrides, tiny):
    """Return look(overrides...) -> (data set, inspection) with every sample shown."""

    def make(*more, ranks=1, pictures=False, train=None):
        cfg = load_config(overrides(*more, train=train))
        data = open_data(cfg.data.train, "data.train", cfg.data, cfg.model.path, read_sizes(tiny()))
        numbers = range(sum(map(len, data.indexes)))
        return data, collect_statistics(cfg, data, numbers, ranks, pictures)

    return make


def test_keys_that_are_passed_over_are_shown(look, folder):
    records = [{"prompt": "a", "completion": "b", "score": 1, "meta": {}}] * 2
    (folder / "more.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    _, inspection = look(train=folder / "more.jsonl")
    facts = Facts(inspection_report(inspection))
    for words in (facts.text, printed(inspection), "".join(facts.page().words)):
        assert "the model does not see these keys of records" in words and "'score' (2);" in words
    _, quiet = look("data.unknown_keys=ignore", train=folder / "more.jsonl")
    assert quiet.unused_keys == ""


@pytest.fixture(scope="module")
def seen(look):
    return look(pictures=True)


@pytest.fixture(scope="module")
def facts(seen):
    return Facts(inspection_report(seen[1]))


@pytest.fixture(scope="module")
def page(facts):
    return facts.page()


def shown(inspection, name):
    return inspection.shown[SHOWN.index(name)]


def printed(inspection, **options) -> str:
    console = Console(file=io.StringIO(), width=400, highlight=False, **options)
    print_report(inspection_report(inspection), console)
    return console.file.getvalue()


def squeezed(value: str) -> str:
    """Return the lines without the blanks that fill tables up."""
    return "\n".join(re.sub(" {2,}", "  ", line).strip() for line in value.splitlines())


def test_the_terminal_shows_turns_and_collapsed_placeholders(seen):
    lines = squeezed(printed(seen[1]))
    one = "<|vision_start|>[image {}: {} patches, {} tokens]<|vision_end|>"
    for piece in (
        f"user  {one.format(0, '4x6', 6)}What is it?<|im_end|>\nassistant  {{+Red.<|im_end|>+}}",
        "user  "
        + "".join(one.format(*v) for v in ((0, "4x4", 4), (1, "4x6", 6), (2, "2x12", 6)))
        + "Compare.<|im_end|>\n",
        f"And {one.format(3, '6x2', 3)}?<|im_end|>",
        "<|vision_start|><0.2 seconds><|vision_start|>"
        "[video 0, frames 0 and 1: 4x4 patches, 4 tokens]<|vision_end|><1.2 seconds>"
        "<|vision_start|>[video 0, frames 2 and 3: 4x4 patches, 4 tokens]",
        "assistant  {+\u21b5\n\u21b5\nfour\u21b5\n<|im_end|>+}\n",
        "[image 0: 4x4 patches, 4 tokens][image 1: 6x2 patches, 3 tokens]",
        "<script>alert(1)</script> & caf\u00e9 \u4e09 \U0001f642 [bold]x[/bold] \\x1b[2J\\u202e",
    ):
        assert piece in lines
    assert "\x1b" not in lines and "\u202e" not in lines


def test_the_terminal_names_the_place_and_sizes(seen, folder):
    sizes = len(shown(seen[1], "image").sample.ids_S)
    assert (
        f"Sample 1 of {len(SHOWN)}  {folder}/mixed.jsonl:2\n{sizes} tokens, 5 trained, 1 image, "
        "24 patches\n"
    ) in printed(seen[1])


def test_trained_text_is_coloured_in_the_terminal(seen):
    only = replace(seen[1], shown=(shown(seen[1], "image"),))
    output = printed(only, force_terminal=True, color_system="standard")
    black_on_green = "\x1b[30;42m"
    coloured = "".join(re.findall(r"\x1b\[30;42m(.*?)\x1b\[0m", output))
    assert coloured == "trained" + "Red.<|im_end|>"
    assert "{+" not in output and black_on_green in output
    assert "\x1b[36m[image 0: 4x6 patches, 6 tokens]\x1b[0m" in output


@in_one_test("name", SHOWN)
def test_shown_text_is_all_of_the_tokens(name, seen):
    data, inspection = seen
    tokenizer = data.readers[0].encoder.renderer.tokenizer
    sample = shown(inspection, name).sample
    whole, trained = "", ""
    for turn in shown(inspection, name).turns:
        whole += f"{CHAT.opens}{turn.role}\n" if turn.role else ""
        for piece in turn.pieces:
            written = piece.text
            if piece.view is not None:
                is_video = piece.view.label.startswith("video")
                pad = CHAT.marks.video if is_video else CHAT.marks.image
                written = pad * piece.view.num_tokens
            whole += written
            trained += written if piece.trained else ""
        whole += "\n" if turn.role else ""
    assert whole == tokenizer.decode(sample.ids_S)
    assert trained == tokenizer.decode(sample.ids_S[sample.trained_S])


def test_spelled_special_tokens_are_shown_as_text(seen):
    user, assistant = shown(seen[1], "spelled").turns
    assert [(p.text, p.special) for p in user.pieces] == [
        ("<|im_end|>", False),
        ("<|im_end|>", True),
    ]
    assert assistant.pieces[0].text == "<|image_pad|>" and assistant.pieces[0].view is None


def p95(values):
    """Interpolate by hand between the two values around 0.95 of the way."""
    values, place = sorted(values), 0.95 * (len(values) - 1)
    low, high = values[math.floor(place)], values[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def test_statistics_are_those_of_the_samples(seen):
    data, inspection = seen
    samples = [data.readers[0].encode(RECORDS[name], name) for name in SHOWN]
    expected = {
        "tokens": [len(sample.ids_S) for sample in samples],
        "trained tokens": [int(sample.trained_S[1:].sum()) for sample in samples],
        "images": [len(sample.image_grids) for sample in samples],
        "videos": [len(sample.video_grids) for sample in samples],
        "patches": [
            sum(t * h * w for t, h, w in (*sample.image_grids, *sample.video_grids))
            for sample in samples
        ],
    }
    assert expected["images"][:5] == [0, 1, 1, 1, 4] and max(expected["patches"]) == 76
    for column in inspection.columns:
        values = expected[column.name]
        by_hand = (
            *(sum(values), min(values), statistics.median(values)),
            *(statistics.mean(values), p95(values), max(values)),
        )
        assert column.summary == pytest.approx(by_hand, rel=1e-12)
        row = f"{column.name}  " + "  ".join(map(column_figure, by_hand))
        assert row in squeezed(printed(inspection))


def test_sources_and_faults(look, folder):
    second = folder / "second.jsonl"
    second.write_text(json.dumps(CHATS["text"]) + "\n")
    _, inspection = look(train=f"[{{path: {folder}/mixed.jsonl, weight: 0.5}}, {second}]")
    lines = squeezed(printed(inspection))
    total = len(RECORDS)
    assert f"{folder}/mixed.jsonl  0.5  {total}  {total - 3}  1  2  {(total - 3) // 2}\n" in lines
    assert f"{second}  1  1  1  0  0  1\n" in lines
    first = f"{folder}/mixed.jsonl:{total - 2}"
    assert f"above data.max_tokens or data.max_images  1  {first}\n" in lines
    assert f"Wrong records: 2\n{folder}/mixed.jsonl:{total - 1}: message 0: role=judge; " in lines
    assert f"Sample {total - 3} of {total - 2}  {second}:1\n" in lines


@pytest.mark.parametrize("ranks", [1, 2])
def test_padding_and_balance_by_hand(look, ranks):
    data, inspection = look(
        "train.global_batch_size=5", "train.micro_batch_size=2", "data.seed=3", ranks=ranks
    )
    order = data.order.epoch(0).tolist()
    steps = [order[start : start + 5] for start in range(0, len(order), 5)]
    real, positions, micro_batches, loads = 0, [0, 0], [0, 0], [[], []]
    for step in steps:
        sizes = [data.size(*handle) for handle in step]
        tokens = [len(data.indexes[0][sample].ids_S) for _, sample in step]
        real += sum(tokens)
        half = len(step) // ranks if ranks == 2 else len(step)
        parts = [range(half), range(half, len(step))][:ranks]
        in_order = [[list(part[i : i + 2]) for i in range(0, len(part), 2)] for part in parts]
        for way, plan in enumerate((plan_batch(sizes, ranks, Limits(2)), in_order)):
            groups = [group for share in plan for group in share]
            positions[way] += sum(max(tokens[r] for r in group) * len(group) for group in groups)
            micro_batches[way] += sum(map(len, plan))
            costs = [sum(group_cost([sizes[r] for r in group]) for group in s) for s in plan]
            loads[way].append(max(costs) * ranks / sum(costs))
    batching = inspection.batching
    assert (batching.steps, batching.measured) == (len(steps), len(steps)) == (3, 3)
    for way, measured in enumerate(batching.ways):
        assert measured.padding == pytest.approx(1 - real / positions[way])
        assert measured.micro_batches == pytest.approx(micro_batches[way] / len(steps))
        assert measured.imbalance == pytest.approx(statistics.mean(loads[way]))
        assert measured.worst == pytest.approx(max(loads[way]))
    naive = batching.ways[1]
    row = f"in plain order  {naive.padding:.1%}  {naive.imbalance:.3f}x  {naive.worst:.3f}x"
    assert row in squeezed(printed(inspection))
    assert f"{ranks} data parallel rank" in batching.caption


def test_only_the_first_steps_of_a_long_epoch_are_planned(look, monkeypatch):
    monkeypatch.setattr("megatron_vlm.commands.inspect.inspection_report.MAX_STEPS", 2)
    _, inspection = look("train.global_batch_size=4")
    assert (inspection.batching.steps, inspection.batching.measured) == (4, 2)
    assert "the first 2 of 4 steps" in inspection.batching.caption


def test_plain_order_has_as_many_micro_batches_as_token_limits_make(look, folder):
    """Short and long rows alternate, so in plain order at least half of a short one is padding."""
    turns = folder / "turns.jsonl"
    lines = [
        json.dumps({"messages": [say("user", "red " * count), say("assistant", "a")]}) + "\n"
        for count in (10, 200) * 16
    ]
    turns.write_text("".join(lines))
    options = ("train.global_batch_size=32", "train.micro_batch_tokens=900", "data.shuffle=false")
    data, inspection = look(*options, train=turns, ranks=1)
    planned, naive = inspection.batching.ways
    short, long = data.indexes[0].tokens[:2].tolist()
    assert (planned.padding, planned.micro_batches) == (0, math.ceil(16 / (900 // long)) + 1)
    rows = round(32 / planned.micro_batches)
    assert (rows, naive.micro_batches) == (6, 6)
    assert naive.padding == pytest.approx(1 - 16 * (short + long) / (32 * long))
    assert "train.micro_batch_tokens=900" in inspection.batching.caption


@in_one_test(("height", "width", "merge"), [(32, 32, 2), (64, 160, 2), (96, 48, 3)])
def test_pictures_undo_patches(height, width, merge):
    pixels = np.asarray(picture(width, height))
    settings = ImageSettings(merge_size=merge, min_pixels=1)
    assert settings.resized_size(height, width) == (height, width)
    grid = (1, height // 16, width // 16)
    patches = settings.patches(PIL.Image.fromarray(pixels))
    assert np.array_equal(settings.pictures(patches, grid)[0, 0], pixels)
    frames = [np.asarray(picture(width, height, seed)) for seed in range(3)]
    plan = VideoPlan((0, 1, 2), (0.0, 1.0), (2, *grid[1:]), height, width)
    patches = VideoSettings(merge_size=merge).patches(frames, plan)
    actual = VideoSettings(merge_size=merge).pictures(patches, plan.grid)
    assert np.array_equal(actual.reshape(4, height, width, 3), [*frames, frames[2]])


def pictures_of(facts):
    return [pixels for shown in facts.of(OutlinedPictures) for pixels in shown.pictures]


def test_pictures_of_the_report_are_those_the_model_gets(facts, page):
    def resized(size, *given):
        return np.asarray(picture(*given).resize(size, PIL.Image.Resampling.BICUBIC))

    small = resized((64, 64), 64, 64)
    cup = resized((96, 64), 100, 60)
    expected = [cup, small, small]  # image, system, multi-turn
    expected += [small, resized((96, 64), 100, 60, 1), resized((192, 32), 200, 40, 2)]
    expected += [resized((32, 96), 40, 90, 3), small, cup]  # side by side, tools
    expected += [np.full((64, 96, 3), PINK, np.uint8)]
    expected += [np.asarray(picture(64, 64, 10 + number)) for number in (0, 1, 2, 3, 4, 4)]
    expected += [small, resized((32, 96), 40, 90, 3)]  # chunks
    for actual, reference in zip(pictures_of(facts), expected, strict=True):
        assert np.array_equal(actual, reference)
    # The page has the same pictures.
    for shown_image, reference in zip(page.all("img"), expected, strict=True):
        file = io.BytesIO(base64.b64decode(shown_image["src"].split(",")[1]))
        assert np.array_equal(np.asarray(PIL.Image.open(file)), reference)
        assert (shown_image["height"], shown_image["width"]) == tuple(map(str, reference.shape[:2]))


def test_budgets_of_videos_are_named_and_followed(look):
    facts = Facts(inspection_report(look("data.video={max_pixels: 6000}", pictures=True)[1]))
    assert "data.video.max_pixels=6000" in facts.report.lead[0]
    assert "[video 0, frames 4 and 5: 2x2 patches, 1 tokens]" in facts.words


def test_a_long_video_gets_pictures_of_its_beginning(look, monkeypatch):
    monkeypatch.setattr("megatron_vlm.data.tokens.sample_views.MAX_SHOWN_FRAMES", 2)
    inspection = look(pictures=True)[1]
    only = replace(inspection, shown=(shown(inspection, "video"),))
    facts = Facts(inspection_report(only))
    assert [len(each.pictures) for each in facts.of(OutlinedPictures)] == [2, 2, 0]
    assert len(facts.page().all("figcaption")) == 2
    assert "[video 0, frames 4 and 5: 4x4 patches, 4 tokens]" in facts.words


def test_the_page_needs_nothing_else_and_text_of_records_stays_text(page, folder):
    check_self_contained(page, (script_of("paging"),))
    text, words = page.text, "".join(page.words)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; caf\u00e9 \u4e09 \U0001f642 [bold]" in text
    assert words.count("<script>alert(1)</script> & caf\u00e9 \u4e09") == 2
    assert "\x1b" not in text and "\u202e" not in text and "\\x1b[2J\\u202e" in words
    assert "tools is a string that is not JSON" in words and f"{folder}/mixed.jsonl:2" in words


def test_page_and_terminal_say_what_the_report_says(facts, page, seen):
    terminal = squeezed(printed(seen[1]))
    words = "".join(page.words)
    rows = ["above data.max_tokens or data.max_images", "1"]
    rows += [column_figure(each) for column in seen[1].columns for each in column.summary]
    batches = seen[1].batching.caption
    for piece in ("[image 0: 4x6 patches, 6 tokens]", "Wrong records: 2", *rows, batches):
        assert piece in words and piece in " ".join(terminal.split()) and piece in facts.text


def test_trained_spans_are_marked(facts, page, seen):
    marks = [
        "".join(p if isinstance(p, str) else p.text for p in mark.pieces)
        for mark in facts.of(Marked)
    ]
    assert marks.count("Red.<|im_end|>") == 1 and marks.count("\n\nfour\n<|im_end|>") == 1
    trained = sum(any(p.trained for p in turn.pieces) for s in seen[1].shown for turn in s.turns)
    assert len(marks) == 1 + trained == len(page.all("mark"))  # one is in the legend
    newlines = sum(mark.count("\n") for mark in marks)
    assert [a.get("class") for a in page.all("span")].count("newline") == newlines


def test_many_wrong_records_are_told_in_part(seen):
    """A page lists more of them than a terminal."""
    wrong = replace(seen[1], errors=tuple(f"wrong {i}." for i in range(1010)))
    facts = Facts(inspection_report(wrong))
    assert len(facts.of(Listing)[0].sentences) == 1010
    page = facts.page()
    assert len(page.all("li")) == 1000 and "Wrong records: 1,010, the first 1000" in page.words
    terminal = printed(wrong)
    assert "wrong 99." in terminal and "wrong 100." not in terminal and "and 910 more" in terminal


def test_weights_are_shown(look, folder):
    answers = [say("assistant", "half", weight=0.5), say("assistant", "whole", weight=1)]
    turns = [turn for answer in answers for turn in (say("user", "?"), answer)]
    path = folder / "weights.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    inspection = look(train=path)[1]
    lines = squeezed(printed(inspection))
    assert "assistant  (x0.5){+half<|im_end|>+}\n" in lines
    assert "assistant  {+whole<|im_end|>+}\n" in lines
    facts = Facts(inspection_report(inspection))
    weights = [each.text for each in facts.of(Styled) if each.kind == "weight"]
    assert weights == ["x0.5", "x0.5"]  # the first is in the legend
    assert re.search(r'class="weight">x0.5</span>\s*<mark>half', facts.page().text)


def test_a_set_of_videos_has_their_number_and_no_empty_histogram(seen):
    inspection = seen[1]
    columns = tuple(
        Column(each.name, 0 * each.values if each.name == "images" else each.values)
        for each in inspection.columns
    )
    facts = Facts(inspection_report(replace(inspection, columns=columns)))
    [videos] = [each.values for each in columns if each.name == "videos"]
    assert facts.tiles["videos"] == str(videos.sum()) != "0" and "images" not in facts.tiles
    assert [bars.name for bars in facts.of(Bars)] == ["tokens", "trained tokens", "videos"]


def test_a_histogram_of_equal_values_has_one_label():
    words = Page(draw_parts(Bars("tokens", np.array([104, 104])))).words
    assert words.count("104") == 1 and "104 to 104" not in words


def test_bins():
    assert bins(np.array([0, 1, 1, 4])) == (0, 1, [1, 2, 0, 0, 1])
    assert bins(np.array([7])) == (7, 1, [1])
    start, step, counts = bins(np.array([130, 131, 500, 1090]))
    assert (start, step, len(counts)) == (100, 50, 20)
    assert (counts[0], counts[8], counts[19], sum(counts)) == (2, 1, 1, 4)


def test_a_picture_that_cannot_be_decoded_is_named(look, folder):
    whole = io.BytesIO()
    picture(64, 64).save(whole, "PNG")
    (folder / "cut.png").write_bytes(whole.getvalue()[:2000])
    content = [{"type": "image", "image": "cut.png"}, text("?")]
    broken = folder / "broken.jsonl"
    broken.write_text(json.dumps({"messages": [say("user", *content), say("assistant", "!")]}))
    for pictures in (True, False):
        _, inspection = look(train=broken, pictures=pictures)
        problem = f"{broken}:1: image 0: cut.png: cannot be decoded"
        facts = Facts(inspection_report(inspection))
        assert (problem in facts.text) == (problem in printed(inspection)) == pictures
        assert "[image 0: 4x4 patches, 4 tokens]" in facts.words and not pictures_of(facts)


@in_one_test(
    ("options", "error", "words"),
    [
        ({"sample": 14}, ConfigError, "--sample=14: there are 14 samples; give 0 to 13"),
        ({"ranks": 0}, ConfigError, "--ranks=0"),
        ({"samples": -1}, ConfigError, "--samples=-1"),
        ({"html": "/no/such/folder/x.html"}, ConfigError, "cannot be written: No such file"),
        ({"more": ["data.max_tokens=3"]}, DataError, "no sample left: 15 were dropped .*; raise"),
        ({"more": ["train.global_batch_size=0"]}, ConfigError, "train.global_batch_size=0"),
        ({"train": "{path: x.jsonl, streaming: true}"}, ConfigError, "data.train is a stream"),
    ],
)
def test_what_cannot_be_shown_is_refused(options, error, words, overrides):
    options = dict(html=None, samples=1, sample=None, ranks=1, more=[], train=None) | options
    arguments = overrides(*options.pop("more"), train=options.pop("train"))
    with pytest.raises(error, match=words):
        run_inspect(load_config(arguments), **options)


def test_all_wrong_records_are_listed_before_they_are_an_error(overrides, folder, tmp_path, capsys):
    """Not only the first one, and more than data.max_errors, which counts skipped ones."""
    html = str(tmp_path / "wrong.html")
    strict = [*overrides(), "data.max_errors=0"]
    look = {"samples": 1, "sample": None, "ranks": 1}
    with raises(DataError, key="data.train", problem_has="2 of 17 records are wrong") as error:
        run_inspect(load_config(strict), html, **look)
    assert "data.max_errors=" in error.value.remedy
    output = " ".join(capsys.readouterr().out.split())
    for number, name in enumerate(RECORDS, 1):
        assert (f"mixed.jsonl:{number}: " in output) == name.startswith("wrong")
    assert "Sample 0" in output and "mixed.jsonl:17" in (tmp_path / "wrong.html").read_text()
    with raises(DataError, key="data.max_errors"):  # the user's choice stays
        run_inspect(load_config([*strict, "data.max_errors=1"]), None, **look)


def test_wrong_records_are_listed_where_nothing_else_is_left(overrides, tmp_path, capsys):
    """All keys that are refused are named at once, with the number of records that have them."""
    records = [
        {**RECORDS["text"], "loss_mask": 1},
        {"messages": []},
        {**RECORDS["text"], "inputs": 1},
    ]
    file = tmp_path / "wrong.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = [*overrides(train=file), "data.max_errors=0"]
    with raises(DataError, problem_has="3 of 3", remedy_has="[inputs,loss_mask]"):
        run_inspect(load_config(arguments), None, samples=1, sample=None, ranks=1)
    output = " ".join(capsys.readouterr().out.split())
    assert all(f"wrong.jsonl:{number}: " in output for number in (1, 2, 3)) and "wrong: 3" in output


def test_the_command_shows_what_is_asked_for(overrides, capsys, tmp_path):
    run_inspect(load_config(overrides()), str(tmp_path / "out.html"), samples=3, sample=2, ranks=1)
    output = capsys.readouterr().out
    assert re.findall(r"^Sample \d+", output, re.MULTILINE) == ["Sample 2"]
    assert "Answer with a single word." in output and "wrote " in output
    assert (tmp_path / "out.html").read_text(encoding="utf-8").count("<article") == 1
    run_inspect(load_config(overrides()), None, samples=2, sample=None, ranks=1)
    output = capsys.readouterr().out
    assert re.findall(r"^Sample \d+", output, re.MULTILINE) == ["Sample 0", "Sample 1"]
    # Without a number, the page has more samples than the terminal.
    page = tmp_path / "many.html"
    run_inspect(load_config(overrides()), str(page), samples=None, sample=None, ranks=1)
    output = capsys.readouterr().out
    assert re.findall(r"^Sample \d+", output, re.MULTILINE) == [f"Sample {i}" for i in range(3)]
    assert page.read_text(encoding="utf-8").count("<article") == len(SHOWN)


def test_pictures_that_break_off_are_found_by_decoding(overrides, folder, tmp_path, capsys):
    """Their headers are right, so that opening the set does not notice them."""
    whole = io.BytesIO()
    PIL.Image.effect_noise((96, 64), 90).convert("RGB").save(whole, "JPEG")
    (tmp_path / "whole.jpg").write_bytes(whole.getvalue())
    (tmp_path / "cut.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) * 6 // 10])
    records = [
        {"image": name, "question": "What?", "answer": "It."}
        for name in ("whole.jpg", "cut.jpg", "whole.jpg")
    ] + [{"question": "What?", "answer": "It."}]
    train = tmp_path / "cut.jsonl"
    train.write_text("".join(json.dumps(record) + "\n" for record in records))
    show = dict(samples=0, sample=None, ranks=1)
    cfg = load_config(overrides("data.max_errors=0", train=train))
    run_inspect(cfg, None, **show)
    assert "samples: 4, " in capsys.readouterr().out
    with raises(DataError, key="data.train", problem_has="1 of 4 records is wrong"):
        run_inspect(cfg, None, **show, decode=True)
    output = squeezed(capsys.readouterr().out)
    assert "Wrong records: 1\n" in output and "cut.jsonl:2: image 0: cut.jpg: cannot be" in output
    assert "samples: 3, " in output and "images: 2, " in output
    run_inspect(load_config(overrides(train=train)), None, **show, decode=True)
    assert "wrong: 1" in capsys.readouterr().out  # data.max_errors=100
    train.write_text(json.dumps(records[1]) + "\n")
    with raises(DataError, problem_has="1 of 1 records is wrong"):
        run_inspect(cfg, None, **show, decode=True)


def test_warnings_of_the_data_stand_in_the_report_alone(overrides, folder, caplog):
    def warnings():
        return [each for each in caplog.messages if "skipped" in each]

    cfg = load_config(overrides())
    run_inspect(cfg, None, samples=1, sample=None, ranks=1)
    assert not warnings()
    open_data(cfg.data.train, "data.train", cfg.data, cfg.model.path, read_sizes(cfg.model.path))
    assert warnings()  # later callers get the warnings
