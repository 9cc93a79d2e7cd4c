# .venv/bin/python -m pytest tests/package/test_prepare.py
"""The prepare scripts as users run them, on small stand-ins with the columns of the real sets."""

import importlib
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from megatron_vlm.config import load_config
from megatron_vlm.errors import ConfigError, MegatronVLMError
from megatron_vlm.run.evaluation.evaluate import read_candidates
from tests.support.error_fields import raises

SCRIPTS = Path(__file__).parents[2] / "scripts"
TEXTS = [{key: datasets.Value("string") for key in ("user", "assistant", "source")}]
CAULDRON = datasets.Features({"images": datasets.List(datasets.Image()), "texts": TEXTS})


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def run(script: str, *args: str | Path, tmp_path: Path) -> subprocess.CompletedProcess:
    """Run the script in a process of its own, without a network or a user's cache."""
    return subprocess.run(
        [sys.executable, SCRIPTS / f"{script}.py", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        check=False,
    )


@pytest.fixture
def script(monkeypatch):
    """Return script(name), which imports a module of scripts/ as when it is run."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def solid(mode: str, colour, size=(3, 2)) -> Image.Image:
    return Image.new(mode, size, colour)


def open_image(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
    return image


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def turn(user: str | None, assistant: str | None) -> dict:
    return {"user": user, "assistant": assistant, "source": "test"}


def file_of(content: bytes) -> dict:
    return {"bytes": content, "path": None}


def noise() -> Image.Image:
    return Image.frombytes("RGB", (32, 32), np.random.default_rng(0).bytes(32 * 32 * 3))


RED_PNG = encode(solid("RGB", (255, 0, 0)))
BLUE_JPEG = encode(solid("RGB", (0, 0, 255), (8, 8)), "JPEG")
CORRUPT = encode(noise())[:1500]  # a whole header, half of the pixels
ROWS = [
    ([RED_PNG], [turn("What is it?", "Red.")]),
    (
        [BLUE_JPEG, RED_PNG],
        [turn("First\n or\tsecond?", "Beide: \u201crot\u201d"), turn("Sure?", "Yes.")],
    ),
    ([], [turn("No picture?", "None.")]),
    ([RED_PNG], [turn("Empty?", " \n")]),
    ([BLUE_JPEG, CORRUPT], [turn("Corrupt?", "Yes.")]),
    ([RED_PNG], []),
    ([b"not an image"], [turn("Corrupt?", "Yes.")]),
    ([RED_PNG], [turn("Two", "turns"), turn(None, "a")]),
    (None, None),
    ([BLUE_JPEG], [turn("Last?", "Yes.")]),
]


def cauldron(rows) -> datasets.Dataset:
    """Return a data set as load_dataset gives it, with images as the bytes of their files."""
    columns = [
        {"images": images and [file_of(image) for image in images], "texts": texts}
        for images, texts in rows
    ]
    return datasets.Dataset.from_list(columns, features=CAULDRON)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cauldron") / "disk"
    cauldron(ROWS).save_to_disk(folder)
    return folder


def test_cauldron_rows_become_messages(stand_in, tmp_path):
    out = tmp_path / "out"
    done = run("prepare_cauldron", "x", "--dataset", stand_in, "--out", out, tmp_path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = (out / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[0] == (
        '{"messages": [{"role": "user", "content": [{"type": "image", "image": '
        '"images/000000.png"}, {"type": "text", "text": "What is it?"}]}, '
        '{"role": "assistant", "content": "Red."}]}'
    )
    assert json.loads(lines[1]) == {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "images/000001-0.jpg"},
                    {"type": "image", "image": "images/000001-1.png"},
                    {"type": "text", "text": "First\n or\tsecond?"},
                ],
            },
            {"role": "assistant", "content": "Beide: \u201crot\u201d"},
            {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
            {"role": "assistant", "content": "Yes."},
        ]
    }
    assert len(lines) == 3 and "images/000009.jpg" in lines[2]
    # RGB files keep their bytes.
    assert {path.name: path.read_bytes() for path in (out / "images").iterdir()} == {
        "000000.png": RED_PNG,
        "000001-0.jpg": BLUE_JPEG,
        "000001-1.png": RED_PNG,
        "000009.jpg": BLUE_JPEG,
    }
    assert sorted(path.name for path in out.iterdir()) == ["images", "train.jsonl"]
    report = done.stdout.splitlines()
    assert report[:2] == [f"3 records in {out}/train.jsonl", f"4 images in {out}/images"]
    assert report[2] == "left out 2 without images: row 2; row 8"
    assert report[3] == "left out 3 with an empty question or answer: row 3; row 5; row 7"
    assert report[4:] == [
        "left out 2 with a corrupt image: row 4, image 1: the image cannot be decoded: image file "
        "is truncated; row 6, image 0: an image given as bytes: is not an "
        "image that can be opened: it is none of JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF, "
        "or its header is damaged; convert it to one of them, or drop it"
    ]


@pytest.mark.slow
def test_limit_and_parquet_in_a_folder_of_the_subset(script, tmp_path):
    folder = tmp_path / "all" / "ai2d"
    folder.mkdir(parents=True)
    cauldron(ROWS).to_parquet(folder / "train-00000-of-00001.parquet")
    args = ["ai2d", "--dataset", tmp_path / "all", "--out"]
    done = run("prepare_cauldron", *args, tmp_path / "a", "--limit", "4", tmp_path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(records(tmp_path / "a" / "train.jsonl")) == 2
    assert done.stdout.splitlines()[2:] == [
        "left out 1 without images: row 2",
        "left out 1 with an empty question or answer: row 3",
    ]
    assert run("prepare_cauldron", *args, tmp_path / "b", tmp_path=tmp_path).returncode == 0
    assert len(records(tmp_path / "b" / "train.jsonl")) == 3
    # Nothing has been copied into a cache.
    assert not list((tmp_path / "hf").rglob("*.arrow"))
    with pytest.raises(ConfigError, match=r"it has \['ai2d'\]; give the folder of a data set"):
        script("prepare_cauldron").main(["ai3d", *map(str, args[1:]), str(tmp_path / "c")])


def exif_turned() -> bytes:
    """Return a JPEG of 16 x 8, red to the left, that a camera held upright marked for turning."""
    image = solid("RGB", (255, 0, 0), (16, 8))
    image.paste((0, 0, 255), (8, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # the first row is the right side
    return encode(image, "JPEG", exif=exif, quality=100, subsampling=0)


def palette(transparent: bool) -> bytes:
    image = solid("P", 1, (1, 1))
    image.putpalette([0, 0, 0, 10, 20, 30])
    return encode(image, **({"transparency": 1} if transparent else {}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (encode(solid("RGBA", (200, 100, 0, 255))), (200, 100, 0)),
        (encode(solid("RGBA", (0, 0, 0, 0))), (255, 255, 255)),
        (encode(solid("RGBA", (0, 0, 0, 51))), (204, 204, 204)),
        (encode(solid("LA", (40, 255))), (40, 40, 40)),
        (encode(solid("LA", (40, 0))), (255, 255, 255)),
        (encode(solid("L", 77)), (77, 77, 77)),
        (encode(solid("1", 1)), (255, 255, 255)),
        (encode(solid("1", 0)), (0, 0, 0)),
        (palette(False), (10, 20, 30)),
        (palette(True), (255, 255, 255)),
        (encode(solid("RGB", (9, 8, 7)), transparency=(9, 8, 7)), (255, 255, 255)),
        (encode(solid("CMYK", (0, 255, 255, 0)), "TIFF"), (255, 0, 0)),
        (encode(Image.fromarray(np.full((2, 3), 0x8040, np.uint16))), (128, 128, 128)),
        (encode(Image.fromarray(np.full((2, 3), 0x00FF, np.uint16))), (0, 0, 0)),
        (encode(solid("RGB", (1, 2, 3)), "WEBP", lossless=True), (1, 2, 3)),
    ],
)
def test_every_mode_becomes_rgb_on_white(script, content, expected):
    picture = script("prepare").rgb_picture(file_of(content), "here")
    image = Image.open(io.BytesIO(picture.content))
    assert (image.mode, picture.suffix, image.format) == ("RGB", ".png", "PNG")
    assert not image.has_transparency_data
    assert set(image.get_flattened_data()) == {expected}


def test_a_photo_is_turned_as_its_camera_says(script):
    picture = script("prepare").rgb_picture(file_of(exif_turned()), "here")
    image = Image.open(io.BytesIO(picture.content))
    assert (image.size, image.getexif().get(0x0112)) == ((8, 16), None)
    assert image.getpixel((4, 2))[0] > 200 and image.getpixel((4, 13))[2] > 200


def test_a_broken_run_leaves_no_half_file(stand_in, script, tmp_path, monkeypatch, capsys):
    cauldron = script("prepare_cauldron")
    out = tmp_path / "out"
    args = ["x", "--dataset", str(stand_in), "--out", str(out)]

    def break_down(dataset):
        yield {"images": [file_of(RED_PNG)], "texts": [turn("q", "a")]}
        assert [path.name for path in out.iterdir() if path.is_file()] == ["train.jsonl.part"]
        raise RuntimeError("the network is gone")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="network is gone"):
        patch.setattr(cauldron, "rows", break_down)
        cauldron.main(args)
    assert [path.name for path in out.iterdir()] == ["images"]
    # The next run may use the same folder, and the one after it may not.
    cauldron.main(args)
    before = (out / "train.jsonl").read_bytes()
    with raises(ConfigError, place=str(out / "train.jsonl"), problem="exists"):
        cauldron.main(args)
    assert (out / "train.jsonl").read_bytes() == before
    assert capsys.readouterr().out.count("3 records") == 1


@pytest.mark.parametrize(
    ("rows", "args", "words"),
    [
        ([{"image": 1}], [], "with the columns image: has neither images nor texts"),
        ([{"images": [], "texts": []}], [], "left out 1 without images: row 0"),
        ([{"image": 1}], ["--limit", "0"], "--limit=0; give at least 1"),
    ],
)
def test_cauldron_refuses(script, rows, args, words, tmp_path):
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "disk")
    paths = ["x", "--dataset", str(tmp_path / "disk"), "--out", str(tmp_path / "out")]
    with pytest.raises(MegatronVLMError, match=words):
        script("prepare_cauldron").main([*paths, *args])
    assert not list(tmp_path.glob("out/*.jsonl*"))


@pytest.mark.full
def test_without_a_network_the_hub_is_an_error_of_one_sentence(tmp_path):
    done = run("prepare_cauldron", "ai2d", "--out", tmp_path / "out", tmp_path=tmp_path)
    assert done.returncode == 2
    assert "HuggingFaceM4/the_cauldron: `datasets` cannot load it: " in done.stderr
    assert "Traceback" not in done.stderr


def test_splits_of_save_to_disk(script, tmp_path):
    splits = {"train": cauldron(ROWS[:1]), "test": cauldron(ROWS[1:2])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "disk")
    main = script("prepare_cauldron").main
    args = ["x", "--dataset", str(tmp_path / "disk"), "--out", str(tmp_path / "out")]
    with raises(ConfigError, key="--split", found="dev", allowed=("train", "test")):
        main([*args, "--split", "dev"])
    main([*args, "--split", "test"])
    assert "Beide" in (tmp_path / "out" / "train.jsonl").read_text()


SIZES = {"image_0001": (960, 640), "image_0002": (100, 300), "image_0003": (480, 481)}


@pytest.fixture(scope="module")
def caltech(tmp_path_factory) -> Path:
    """Return a folder with two classes of 20, one of 3 with odd sizes and one corrupt, one of a
    single photo, and the background."""
    root = tmp_path_factory.mktemp("caltech")
    classes = {"BACKGROUND_Google": 5, "Faces_easy": 20, "accordion": 20, "emu": 1}
    for name, count in classes.items():
        for index in range(count):
            path = root / "101_ObjectCategories" / name / f"image_{index:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            solid("RGB", (index, 0, 0), (8, 8)).save(path)
    wild = root / "101_ObjectCategories" / "wild_cat"
    wild.mkdir()
    for stem, size in SIZES.items():
        solid("L", 128, size).save(wild / f"{stem}.jpg")
    (wild / "image_0004.jpg").write_bytes(BLUE_JPEG[:100])
    (wild / "notes.txt").write_text("not a photo")
    return root


def labels(path: Path) -> Counter:
    counts = Counter()
    for record in records(path):
        user, assistant = record["messages"]
        (image, text) = user["content"]
        assert (user["role"], assistant["role"], image["type"]) == ("user", "assistant", "image")
        assert text == {"type": "text", "text": "What is the name of the subject in this photo?"}
        start = "The subject in this photo is: "
        assert assistant["content"].startswith(start)
        counts[assistant["content"].removeprefix(start)] += 1
    return counts


@pytest.mark.full
def test_caltech_folder(caltech, tmp_path):
    out = tmp_path / "out"
    done = run("prepare_caltech101", caltech, "--out", out, tmp_path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    held_out = labels(out / "eval.jsonl")
    # A tenth of 20 is 2. One of the four cats is held out, and the corrupt one is in either split.
    cats = held_out.pop("wild cat", 0)
    assert held_out == {"Faces easy": 2, "accordion": 2}
    train = labels(out / "train.jsonl")
    assert train == {"Faces easy": 18, "accordion": 18, "emu": 1, "wild cat": 3 - cats}
    report = done.stdout.splitlines()
    assert report[:3] == [
        f"{40 - cats} records in {out}/train.jsonl",
        f"{4 + cats} records in {out}/eval.jsonl",
        f"44 images in {out}/images",
    ]
    assert report[3].startswith("left out 1 with a corrupt image: wild_cat/image_0004.jpg: ")
    named = [
        record["messages"][0]["content"][0]["image"]
        for split in ("train", "eval")
        for record in records(out / f"{split}.jsonl")
    ]
    assert sorted(named) == sorted(f"images/{path.name}" for path in out.glob("images/*"))
    images = [open_image(out / name) for name in named]
    assert {image.mode for image in images} == {"RGB"}
    sizes = sorted(image.size for image in images if image.size != (8, 8))
    assert sizes == [(100, 300), (479, 480), (480, 320)]
    # RGB files of at most 480 pixels are unchanged.
    assert Counter(Path(name).suffix for name in named) == {".jpg": 41, ".png": 3}
    # The records are not in the order of the classes.
    order = [record["messages"][1]["content"] for record in records(out / "train.jsonl")]
    assert len(set(order[:10])) > 1


def test_caltech_recipe_ranks_the_names_of_the_classes(script, caltech, tmp_path, capsys):
    """A candidate behind the prefill must be an answer word for word, or no answer is ever
    right."""
    out = tmp_path / "out"
    source = str(caltech / "101_ObjectCategories")
    script("prepare_caltech101").main([source, "--out", str(out)])
    assert f"4 names in {out}/classes.txt" in capsys.readouterr().out
    names = (out / "classes.txt").read_text().splitlines()
    assert names == ["Faces easy", "accordion", "emu", "wild cat"]
    cfg = load_config(["data=caltech101", "train=caltech101", "model.path=x"])
    assert cfg.eval.candidates == "caltech101/classes.txt"
    candidates = {cfg.eval.prefill + name for name in read_candidates(str(out / "classes.txt"))}
    answers = {
        record["messages"][-1]["content"]
        for split in ("train", "eval")
        for record in records(out / f"{split}.jsonl")
    }
    assert answers == candidates


def test_caltech_split_is_a_matter_of_the_seed(script, caltech, tmp_path):
    for name, args in {
        "a": ["--seed", "3", "--eval-fraction", "0.3"],
        "b": ["--seed", "3", "--eval-fraction", "0.3"],
        "c": ["--seed", "4", "--eval-fraction", "0.3"],
        "d": ["--eval-fraction", "0", "--background"],
    }.items():
        source = str(caltech / "101_ObjectCategories")
        script("prepare_caltech101").main([source, "--out", str(tmp_path / name), *args])
    files = [sorted(p for p in (tmp_path / n).rglob("*") if p.is_file()) for n in "ab"]
    assert [p.name for p in files[0]] == [p.name for p in files[1]]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]
    a, c = (labels(tmp_path / name / "eval.jsonl") for name in "ac")
    assert a["accordion"] == c["accordion"] == a["Faces easy"] == 6
    held_out = [
        {record["messages"][0]["content"][0]["image"] for record in records(path)}
        for path in sorted(tmp_path.glob("[ac]/eval.jsonl"))
    ]
    # One of the seeds draws the corrupt picture, which is left out after that.
    assert abs(len(held_out[0]) - len(held_out[1])) <= 1 and held_out[0] != held_out[1]
    assert not (tmp_path / "d" / "eval.jsonl").exists()
    assert labels(tmp_path / "d" / "train.jsonl")["BACKGROUND Google"] == 5


def label_table(labels: list[int]) -> datasets.Dataset:
    names = ["background_google", "car_side", "emu"]
    return datasets.Dataset.from_dict(
        {
            "image": [file_of(CORRUPT if i == 4 else RED_PNG) for i in range(len(labels))],
            "label": labels,
        },
        features=datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
        ),
    )


def test_caltech_as_a_data_set(script, tmp_path, capsys):
    label_table([0, 1, 1, 2, 2, 1, 2, 0]).save_to_disk(tmp_path / "disk")
    args = [str(tmp_path / "disk"), "--eval-fraction", "0", "--out", str(tmp_path / "out")]
    script("prepare_caltech101").main(args)
    assert labels(tmp_path / "out" / "train.jsonl") == {"car side": 3, "emu": 2}
    assert "left out 1 with a corrupt image: row 4: the image cannot" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dataset", "args", "words"),
    [
        (label_table([1, -1]), [], "row 1: label=-1 is not a class; choose another --split"),
        (datasets.Dataset.from_dict({"image": [1], "label": ["emu"]}), [], "a ClassLabel label"),
        (
            label_table([1]),
            ["--eval-fraction", "1"],
            "--eval-fraction=1.0; give at least 0 and less",
        ),
        (label_table([1]), [], "a split: has no records"),
    ],
)
def test_caltech_refuses(script, dataset, args, words, tmp_path):
    dataset.save_to_disk(tmp_path / "disk")
    paths = [str(tmp_path / "disk"), "--out", str(tmp_path / "out")]
    with pytest.raises(MegatronVLMError, match=words):
        script("prepare_caltech101").main([*paths, *args])
    assert not list(tmp_path.glob("out/*.jsonl*"))


def test_a_folder_without_photos_is_refused(script, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no CLASS/\*\.jpg; give the folder"):
        main = script("prepare_caltech101").main
        main([str(tmp_path / "empty"), "--out", str(tmp_path / "out")])
