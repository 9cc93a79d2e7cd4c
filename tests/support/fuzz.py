"""Mutated files of every kind, and the outcomes of reading them.

A kind is a function of an empty folder. It writes valid content there and returns an attempt, which
writes something mutated, reads it as the package does and returns the outcome. The attempt may
raise only errors of the package, and they name the file.
"""

import contextlib
import faulthandler
import gzip
import io
import json
import os
import random
import resource
import shutil
import sys
import tarfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import huggingface_hub

from megatron_vlm.errors import MegatronVLMError
from tests.support.mutation import mutate_bytes, mutate_json, mutate_value

Attempt = Callable[[random.Random], str]
_HANG_S = 60  # seconds for one input; the slowest inputs take less than a second
_SHOWN = 60  # number of failures in a report
ANSWER = {"role": "assistant", "content": "answer"}


def run(kind: str, folder: str, first: int, count: int) -> dict[str, Any]:
    """Return the outcomes of `count` inputs, their failures, and the growth of memory in MiB."""
    warnings.simplefilter("ignore")
    quiet()
    attempt = KINDS[kind](Path(folder))
    with contextlib.suppress(Exception):
        attempt(random.Random("the first one imports"))
    before = _peak(reset=True)
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for number in range(first, first + count):
        faulthandler.dump_traceback_later(_HANG_S, exit=True)
        print(kind, number, file=sys.stderr, flush=True)  # the last line where the process dies
        try:
            outcomes[attempt(random.Random(f"{kind} {number}"))] += 1
        except MegatronVLMError as error:
            outcomes[f"refused: {type(error).__name__}"] += 1
            if folder not in str(error):
                failures.append(f"{kind} {number}: {type(error).__name__} without a file: {error}")
        except Exception:
            failures.append(f"{kind} {number}: " + "".join(traceback.format_exc()[-1500:]))
    faulthandler.cancel_dump_traceback_later()
    report = {"outcomes": dict(outcomes), "failures": failures[:_SHOWN], "failed": len(failures)}
    return report | {"grown": _peak() - before}


def quiet() -> None:
    """Silence the libraries, which print what they think of broken files."""
    import logging

    logging.disable(logging.CRITICAL)
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def _peak(reset: bool = False) -> float:
    if not reset:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1]) / 2**20


# Checkpoints of Hugging Face, with one of their files changed.


def _checkpoint(folder: Path, family: str = "qwen3_vl") -> Path:
    from megatron_vlm.commands.demo.tiny_model import write_tiny
    from megatron_vlm.family.tiny import TinySpec

    path = folder / "model"
    sizes = dict(hidden=16, intermediate=16, layers=2, heads=2, kv_heads=1, head_dim=8)
    vision = dict(vision_hidden=16, vision_intermediate=16, vision_depth=2, vision_heads=2)
    if family != "qwen3_vl":
        sizes |= dict(head_dim=32, full_attention_interval=2)
    write_tiny(path, TinySpec(family, **sizes, **vision, deepstack=1))
    return path


def _changed(valid: Any, chance: random.Random) -> bytes:
    """Return other bytes, or the text of another value of JSON."""
    return mutate_bytes(valid, chance) if isinstance(valid, bytes) else mutate_json(valid, chance)


def _attempt(file: Path, valid: Any, read: Callable[[], object]) -> Attempt:
    """Return an attempt that writes a file with changes, and reads it."""

    def attempt(chance: random.Random) -> str:
        file.write_bytes(_changed(valid, chance))
        return str(read() or "read")

    return attempt


def _settings(
    folder: Path, name: str, read: Callable[[Path], object], family: str = "qwen3_vl"
) -> Attempt:
    """Return an attempt that changes one JSON file of a checkpoint."""
    path = _checkpoint(folder, family)
    return _attempt(path / name, json.loads((path / name).read_bytes()), lambda: read(path))


def config_json(folder: Path) -> Attempt:
    def read(path: Path) -> None:
        from megatron_vlm.family import read_sizes
        from megatron_vlm.family.config_json import read_counts

        failure = None
        try:
            counts = read_counts(str(path))
        except MegatronVLMError as error:
            failure = error
        sizes = read_sizes(path)
        # Counts that are refused early would be refused later, too.
        assert failure is None, failure
        text, vision = sizes.text, sizes.vision
        others = [
            "patch_inputs",
            "gated",
            "layers",
            "norm_eps",
            "rotary",
            "logit_cap",
            "embed_scale",
        ]
        others += ["pad_id", "centered_norms", "window", "sees_image", "values_are_keys"]
        of_layers = [part for layer in text.kinds for part in (layer.mixer, layer.ffn)]
        for part in (text, vision, *of_layers):
            for name in (each.name for each in fields(part)):
                assert type(getattr(part, name)) is int or name in others, name
        assert counts is None or counts.layers == text.num_layers
        assert counts is None or counts.divided_by_tp.items() <= text.divided_by_tp.items()
        assert all(isinstance(side, int) for spec in sizes.tensors for side in spec.shape)

    families = ("qwen3_vl", "qwen3_5", "gemma4")
    attempts = [_settings(folder / each, "config.json", read, each) for each in families]
    return lambda chance: chance.choice(attempts)(chance)


def generation_config(folder: Path) -> Attempt:
    def read(path: Path) -> None:
        from megatron_vlm.data.tokens.tokenizer import stop_ids

        assert all(type(token) is int for token in stop_ids(path, (3,)))

    return _settings(folder, "generation_config.json", read)


def preprocessor(folder: Path) -> Attempt:
    def read(path: Path) -> None:
        import PIL.Image

        from megatron_vlm.family.qwen.images import ImageSettings

        settings = ImageSettings.from_checkpoint(path)
        settings.table()
        if settings.min_pixels <= 2**20:
            t, h, w = settings.grid(70, 50)
            if h * w * settings.patch_size**2 < 2**20:
                patches = settings.patches(PIL.Image.new("RGB", (50, 70)))
                assert len(patches) == t * h * w > 0

    return _settings(folder, "preprocessor_config.json", read)


def video_preprocessor(folder: Path) -> Attempt:
    def read(path: Path) -> None:
        from megatron_vlm.family.qwen.videos import VideoSettings
        from megatron_vlm.family.video_plan import VideoInfo

        settings = VideoSettings.from_checkpoint(path)
        settings.table()
        with contextlib.suppress(MegatronVLMError):
            assert min(settings.plan(VideoInfo(16, 8.0, 70, 50)).grid) > 0

    return _settings(folder, "video_preprocessor_config.json", read)


def processor_config(folder: Path) -> Attempt:
    path = _checkpoint(folder)
    video = json.loads((path / "video_preprocessor_config.json").read_bytes())
    image = json.loads((path / "preprocessor_config.json").read_bytes())
    valid = {"video_processor": video, "image_processor": image, "processor_class": "Qwen3VL"}

    def read() -> None:
        from megatron_vlm.family.qwen.videos import VideoSettings

        VideoSettings.from_checkpoint(path)

    return _attempt(path / "processor_config.json", valid, read)


def _encode(path: Path) -> None:
    from megatron_vlm.config.schema import DataConfig
    from megatron_vlm.data.media.media import MediaPolicy
    from megatron_vlm.data.records.formats import parse_record
    from megatron_vlm.data.tokens.reader import make_encoder
    from megatron_vlm.data.tokens.sample import RecordDropped

    encoder = make_encoder(str(path), DataConfig(max_tokens=4096, special_tokens="escape"))
    record = {"messages": [{"role": "user", "content": "question <|im_end|>"}, ANSWER]}
    try:
        sample = encoder.encode(parse_record(record, f"{path}:1"), MediaPolicy(None))
    except RecordDropped:
        return
    assert sample.num_supervised and sample.ids_S.min() >= 0


def chat_template(folder: Path) -> Attempt:
    path = _checkpoint(folder)
    file = path / "chat_template.jinja"
    return _attempt(file, file.read_bytes(), lambda: _encode(path))


def _load(path: Path) -> None:
    """Load every tensor of a checkpoint, and check its shape against the header."""
    from megatron_vlm.hf.checkpoint_files import digests
    from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
    from megatron_vlm.hf.load_weights import check_tensors

    source = HFCheckpoint(path)
    try:
        source.read_headers()
        check_tensors(source)
        for name, info in source.tensors.items():
            assert source.read(name, ()).shape == info.shape
        digests(source)
    finally:
        source.close()


def safetensors_header(folder: Path) -> Attempt:
    path = _checkpoint(folder)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])

    def attempt(chance: random.Random) -> str:
        file.unlink()  # a mapped file must not change
        if chance.random() < 0.4:
            file.write_bytes(mutate_bytes(whole[:end], chance) + whole[end:])
        else:
            text = mutate_json(header, chance)
            file.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])
        _load(path)
        return "read"

    return attempt


def safetensors_index(folder: Path) -> Attempt:
    path = _checkpoint(folder)
    whole = (path / "model.safetensors").read_bytes()
    names = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    names.pop("__metadata__", None)
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    valid = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return _attempt(path / "model.safetensors.index.json", valid, lambda: _load(path))


# Files that our own runs write.


def _signed(folder: Path, files: dict[str, bytes]) -> None:
    """Write a complete checkpoint with these files, without a look at their content."""
    from megatron_vlm.checkpoint.manifest import Manifest, write_file, write_manifest

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    written = tuple(write_file(folder / name, [content]) for name, content in files.items())
    write_manifest(folder, Manifest(written, "a", 1, ()))


def complete_json(folder: Path) -> Attempt:
    path = folder / "checkpoints" / "step-00000001"
    path.parent.mkdir()
    _signed(path, {"state.json": b"{}", "rank-00000.safetensors": b"abc"})
    valid = (path / "complete.json").read_bytes()

    def attempt(chance: random.Random) -> str:
        from megatron_vlm.checkpoint.run_checkpoints import find_checkpoint, last_serial

        content = _changed(valid if chance.random() < 0.5 else json.loads(valid), chance)
        (path / "complete.json").write_bytes(content)
        last_serial(path.parent)
        checkpoint = find_checkpoint(folder)
        assert content == valid and checkpoint == path
        return "read"

    return attempt


def checkpoint_texts(folder: Path) -> Attempt:
    """Return an attempt that changes index.json, state.json or config.yaml of a checkpoint whose
    complete.json is right."""
    import torch

    from megatron_vlm.checkpoint.tensor_pieces import make_index, safetensors_chunks
    from megatron_vlm.config import to_yaml
    from megatron_vlm.config.schema import Config, ModelConfig
    from megatron_vlm.hf.hf_checkpoint import HFCheckpoint

    model = _checkpoint(folder)
    source = HFCheckpoint(model)
    shapes = source.sizes.shapes
    tensors, blocks = {}, []
    for name, shape in shapes.items():
        rows, cols = shape[0], max(1, int(torch.tensor(shape[1:]).prod()))
        tensors[f"{name}@0,0"] = torch.zeros(rows, cols)
        blocks.append((name, (0, 0, rows, cols)))
    index = make_index(shapes, [blocks])
    state = {
        "format": 2,
        "layout": {"tp": 1},
        "optimizer_steps": 1,
        "lr": 0.1,
        "progress": {"step": 1, "tokens": 3, "scores": {"a": {"loss": 0.5}}, "scored_step": 1},
    }
    files = {
        "index.json": json.dumps(index).encode(),
        "state.json": json.dumps(state).encode(),
        "config.yaml": to_yaml(Config(model=ModelConfig(str(model)))).encode(),
        "rank-00000.safetensors": b"".join(map(bytes, safetensors_chunks(tensors))),
    }
    values = {"index.json": index, "state.json": state}

    def attempt(chance: random.Random) -> str:
        from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint

        name = chance.choice([*files])
        is_json = name in values and chance.random() < 0.7
        content = _changed(values[name] if is_json else files[name], chance)
        _signed(folder / "step", files | {name: content})
        shutil.rmtree(folder / "out", ignore_errors=True)
        export_checkpoint(str(folder / "step"), str(folder / "out"), str(model))
        return "read"

    return attempt


def cache(folder: Path) -> Attempt:
    """Return an attempt that changes a chunk of the cache of encoded text. The chunk is read, or
    made again."""
    from megatron_vlm.config.data_sources import SourceSpec
    from megatron_vlm.config.schema import DataConfig
    from megatron_vlm.data.sources.source import open_source
    from megatron_vlm.data.tokens.index import build_index
    from megatron_vlm.data.tokens.reader import make_encoder, make_reader
    from megatron_vlm.family import read_sizes

    model = _checkpoint(folder)
    data = folder / "a.jsonl"
    user = {"role": "user", "content": "question"}
    data.write_text((json.dumps({"messages": [user, ANSWER]}) + "\n") * 5)
    cfg = DataConfig(cache_dir=str(folder / "cache"), num_workers=0, max_tokens=4096)
    reader = make_reader(make_encoder(str(model), cfg), cfg, read_sizes(model), str(folder))
    source = open_source(SourceSpec(str(data)), None, None)

    def samples() -> list[Any]:
        index = build_index(source, reader, cfg, folder)
        encoded = [index[i] for i in range(len(index))]
        return [(each.ids_S.tolist(), each.trained_S.tolist()) for each in encoded]

    expected = samples()
    (file,) = (folder / "cache").rglob("*.safetensors")
    valid = file.read_bytes()
    end = 8 + int.from_bytes(valid[:8], "little")

    def attempt(chance: random.Random) -> str:
        file.unlink()
        content = valid
        while content == valid:
            whole = chance.random() < 0.3
            edge = len(valid) if whole else end + 24
            content = mutate_bytes(valid[:edge], chance) + valid[edge:]
        file.write_bytes(content)
        assert samples() == expected
        return "read" if file.read_bytes() == content else "made again"

    return attempt


def model_card_of_base(folder: Path) -> Attempt:
    """Return an attempt that changes the model card of a base, from which its licence is read."""
    path = _checkpoint(folder)
    valid = b"---\nlicense: other\nlicense_name: qwen\ntags: [a, &x b, *x]\n---\n# A model\n"

    def read() -> None:
        import yaml  # type: ignore[import-untyped]

        from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
        from megatron_vlm.hf.model_card import model_card

        _, head, body = model_card(HFCheckpoint(path)).split("---\n", 2)
        metadata = yaml.safe_load(head)
        assert all(isinstance(metadata.get(key, ""), str) for key in ("license", "license_name"))
        assert metadata["library_name"] == "transformers" and body.startswith("\n# ")

    return _attempt(path / "README.md", valid, read)


def candidates(folder: Path) -> Attempt:
    file = folder / "names.txt"

    def read() -> str:
        from megatron_vlm.run.evaluation.evaluate import read_candidates

        try:
            names = read_candidates(str(file))
        except MegatronVLMError as error:
            if error.key == "eval.candidates":
                return "too few"
            raise
        assert len(set(names)) == len(names) > 1 and all(name.strip() for name in names)
        return "read"

    return _attempt(file, "cat\nSeepferd\u00e4\ndog\n".encode(), read)


def metrics_jsonl(folder: Path) -> Attempt:
    from megatron_vlm.report import metrics_lines as kinds

    # One value for each type of a field.
    plain = {"int": 3, "str": "a", "bool": False, "float": 0.5}

    def made(kind: Any, **given: Any) -> Any:
        values = {f.name: plain.get(getattr(f.type, "__name__", ""), 0) for f in fields(kind)}
        return kind(**{**values, **given})

    lines = [made(kinds.StartLine, step=0, layout={"tp": 1}, versions={"torch": "2"}, time="2026")]
    lines += [made(kinds.StepLine, step=step, loss=2.0 / (step + 1)) for step in range(4)]
    lines += [made(kinds.RlLine, step=step, figures={"a": 0.5}) for step in range(4)]
    lines += [made(kinds.EvalLine, step=2, name="a"), kinds.EventLine(2, "resumed")]
    texts = [kinds.to_json(line) for line in lines]
    example = {"where": "a:1", "answer": "b", "prediction": "c", "prompt": "d", "images": ["x"]}
    examples = {"name": "a", "step": 3, "examples": [example]}
    observation = {"text": "c", "images": ["x"]}
    episode = {"answers": ["b", ""], "heard": [observation], "reward": 0.5, "figures": {"a": 1.0}}
    episode |= {"tokens": 3, "cut": False}
    group = {"where": "a:1", "question": "d", "images": ["x"], "episodes": [episode, episode]}
    samples = [{"step": step, **group} for step in range(3)]

    def attempt(chance: random.Random) -> str:
        from megatron_vlm.report.run import write_report

        lines_of_samples = [json.dumps(sample).encode() for sample in samples]
        lines_of_samples[chance.randrange(3)] = mutate_json(samples[1], chance)
        (folder / "samples.jsonl").write_bytes(b"\n".join(lines_of_samples))

        (folder / "config.yaml").write_bytes(mutate_bytes(b"run: a\nmodel:\n  path: b\n", chance))
        (folder / "examples.json").write_bytes(mutate_json(examples, chance))
        place = chance.randrange(len(texts))
        changed = [text.encode() for text in texts]
        changed[place] = mutate_json(json.loads(texts[place]), chance)
        (folder / "metrics.jsonl").write_bytes(b"\n".join(changed))
        write_report(folder)
        return "read"

    return attempt


# Data files.


def valid_records() -> list[dict[str, Any]]:
    """Return records in every format."""
    user = {"role": "user", "content": [{"type": "image", "image": "a.png"}, "what?"]}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    return [
        {"messages": [{"role": "user", "content": "<image>what?"}, ANSWER], "images": ["a.png"]},
        {"messages": [user, {**ANSWER, "weight": 0.5}], "tools": [tool]},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "r", "name": "f"},
                ANSWER,
            ],
            "tools": json.dumps([tool]),
        },
        {
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            "system": "s",
        },
        {"prompt": "q", "completion": "a", "image": "a.png"},
        {"prompt": [{"role": "user", "content": "q"}], "completion": [ANSWER]},
        {"instruction": "i", "input": "j", "output": "o", "history": [["a", "b"]], "system": "s"},
        {"chunks": [{"tokens": [1, 2]}, {"type": "image", "location": "a.png"}, {"tokens": [4]}]},
        {"messages": [{"role": "user", "content": [{"type": "video", "video": ["a.png"] * 4}]},
                      ANSWER]},
    ]  # fmt: skip


def _picture(folder: Path) -> None:
    import PIL.Image

    PIL.Image.linear_gradient("L").convert("RGB").resize((64, 48)).save(folder / "a.png")


def records(folder: Path) -> Attempt:
    """Return an attempt that changes a record, as a service receives it or a line of JSON holds
    it."""
    from megatron_vlm.data.tokens.reader import RowMaker

    _picture(folder)
    options = [{}, {"special_tokens": "escape"}]
    model = str(_checkpoint(folder))
    makers = [RowMaker(model, image_root=str(folder), max_tokens=4096, **each) for each in options]
    valid = valid_records()

    def attempt(chance: random.Random) -> str:
        record = mutate_value(chance.choice(valid), chance)
        row = chance.choice(makers).row(record, where=f"{folder}/a.jsonl:1")
        assert len(row.ids_S) and int(row.ids_S.min()) >= 0
        return "read"

    return attempt


def _read_all(path: Path, streaming: bool) -> str:
    from megatron_vlm.config.data_sources import SourceSpec
    from megatron_vlm.config.schema import DataConfig
    from megatron_vlm.data.records.formats import parse_record
    from megatron_vlm.data.sources.source import open_source
    from megatron_vlm.data.sources.stream import open_stream

    spec, refused = SourceSpec(str(path)), 0

    def take(raw: Callable[[], Any], where: str) -> int:
        try:
            parse_record(raw(), where)
        except MegatronVLMError as error:
            assert str(path) in str(error), error
            return 1
        return 0

    if streaming:
        stream = open_stream([spec], DataConfig(shuffle_window=4), False)
        for record in stream.records(0, None):
            refused += take(record.raw, record.where)
    else:
        cache = path.parent / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        source = open_source(spec, None, cache)
        assert len(source.digest) > 8
        for index in range(len(source)):
            refused += take(lambda i=index: source[i], source.where(index))
    return "a record refused" if refused else "read"


def _data_file(
    name: str, write: Callable[[Path], None], streams: Sequence[bool] = (False, True)
) -> Callable[[Path], Attempt]:
    """Return a kind: files that are mutated as bytes."""

    def kind(folder: Path) -> Attempt:
        os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")
        path = folder / name
        write(path)
        valid = path.read_bytes()

        def attempt(chance: random.Random) -> str:
            path.unlink(missing_ok=True)
            path.write_bytes(mutate_bytes(valid, chance))
            # `datasets` keeps the result that it once made from a Parquet file.
            shutil.rmtree(folder / "datasets", ignore_errors=True)
            return _read_all(path, chance.choice(streams))

        return attempt

    return kind


def _write_lines(path: Path) -> None:
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in valid_records())
    if path.suffix == ".gz":
        lines = gzip.compress(lines)
    elif path.suffix == ".zst":
        import pyarrow

        lines = pyarrow.Codec("zstd").compress(lines, asbytes=True)
    path.write_bytes(lines)


def _write_json(path: Path) -> None:
    path.write_text(json.dumps(valid_records()))


def _table_records() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": f"question {i}"}]},
                {"role": "assistant", "content": [{"type": "text", "text": f"answer {i}"}]},
            ],
            "images": [bytes(range(i + 1))],
            "weight": i / 2,
        }
        for i in range(6)
    ]


def _write_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_table_records()), path)


def _write_arrow(path: Path) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(_table_records())
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)


def _write_tar(path: Path) -> None:
    picture = io.BytesIO()
    import PIL.Image

    PIL.Image.new("RGB", (8, 8)).save(picture, "PNG")
    with tarfile.open(path, "w") as tar:
        for i in range(3):
            texts = {"txt": b"a caption", "png": picture.getvalue()}
            if i:
                texts = {"json": json.dumps(valid_records()[i]).encode()}
            for field, content in texts.items():
                info = tarfile.TarInfo(f"{i:03d}.{field}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def json_lines(folder: Path) -> Attempt:
    """Return an attempt that changes the values of lines, not only their bytes."""
    path, valid = folder / "a.jsonl", valid_records()

    def attempt(chance: random.Random) -> str:
        lines = [mutate_json(chance.choice(valid), chance) for _ in range(4)]
        path.write_bytes(b"\n".join(lines))
        return _read_all(path, chance.random() < 0.1)

    return attempt


def saved_folder(folder: Path) -> Attempt:
    """Return an attempt that changes one file of a folder of `save_to_disk`."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list([{"prompt": "q", "completion": "a"}] * 3).save_to_disk(folder / "s")
    files = {file.name: file.read_bytes() for file in (folder / "s").iterdir()}

    def attempt(chance: random.Random) -> str:
        name = chance.choice([*files])
        file = folder / "s" / name
        file.unlink()
        is_json = name.endswith(".json") and chance.random() < 0.7
        file.write_bytes(_changed(json.loads(files[name]) if is_json else files[name], chance))
        try:
            return _read_all(folder / "s", streaming=False)
        finally:
            file.unlink()
            file.write_bytes(files[name])

    return attempt


# Pictures and videos.


def _pictures(kind: str) -> Callable[[Path], Attempt]:
    def make(folder: Path) -> Attempt:
        import PIL.Image

        from megatron_vlm.data.media.media import MediaPolicy, image_size, read_image
        from megatron_vlm.data.records.record import Image

        picture = PIL.Image.linear_gradient("L").convert("RGB").resize((40, 30))
        exif = PIL.Image.Exif()
        exif[0x0112], exif[0x010E] = 6, "a description"
        file, options = io.BytesIO(), {}
        if kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
            options["exif"] = exif
        if kind == "GIF":
            options |= {"save_all": True, "append_images": [picture.rotate(90)]}
        picture.save(file, kind, **options)
        valid, path = file.getvalue(), folder / f"a.{kind.lower()}"

        def attempt(chance: random.Random) -> str:
            content = mutate_bytes(valid, chance)
            path.write_bytes(content)
            image = Image(path.name) if chance.random() < 0.5 else Image(content)
            policy, where = MediaPolicy(str(folder)), f"{folder}/a.jsonl:1"
            size = image_size(image, policy, where)
            read = read_image(image, policy, where)
            assert read.mode == "RGB" and (read.height, read.width) == size
            return "read"

        return attempt

    return make


def video(folder: Path) -> Attempt:
    import av
    import numpy as np

    from megatron_vlm.data.media.video_file import iter_frames, probe_video

    path = folder / "a.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        container.metadata["title"] = "a title"
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for i in range(10):
            pixels = np.full((32, 48, 3), i * 20, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    valid = path.read_bytes()

    def attempt(chance: random.Random) -> str:
        path.write_bytes(mutate_bytes(valid, chance))
        info = probe_video(path)
        shapes = {frame.shape for frame in iter_frames(path, range(info.num_frames))}
        assert info.num_frames > 0 and min(map(min, shapes)) > 0
        assert (info.height, info.width, 3) in shapes
        return "read"

    return attempt


PICTURES = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")
KINDS: dict[str, Callable[[Path], Attempt]] = {
    "config.json": config_json,
    "generation_config.json": generation_config,
    "preprocessor_config.json": preprocessor,
    "video_preprocessor_config.json": video_preprocessor,
    "processor_config.json": processor_config,
    "tokenizer.json": lambda folder: _settings(folder, "tokenizer.json", _encode),
    "tokenizer_config.json": lambda folder: _settings(folder, "tokenizer_config.json", _encode),
    "chat_template.jinja": chat_template,
    "safetensors header": safetensors_header,
    "safetensors index": safetensors_index,
    "complete.json": complete_json,
    "checkpoint texts": checkpoint_texts,
    "cache": cache,
    "card of the base": model_card_of_base,
    "eval.candidates": candidates,
    "metrics.jsonl": metrics_jsonl,
    "records": records,
    "lines of JSON": json_lines,
    "jsonl": _data_file("b.jsonl", _write_lines),
    "json": _data_file("b.json", _write_json, [False]),
    "gz": _data_file("b.jsonl.gz", _write_lines),
    "zst": _data_file("b.jsonl.zst", _write_lines),
    "parquet": _data_file("b.parquet", _write_parquet),
    "arrow": _data_file("b.arrow", _write_arrow),
    "tar": _data_file("b.tar", _write_tar),
    "save_to_disk": saved_folder,
    **{name: _pictures(name) for name in PICTURES},
    "mp4": video,
}
