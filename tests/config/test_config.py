# .venv/bin/python -m pytest tests/config/test_config.py
"""Tests of the configuration: recipes, overrides and keys that do not exist."""

import math
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest

from megatron_vlm.config import config_dir, from_yaml, load_config, to_yaml
from megatron_vlm.config.bounds import check_bounds, ranges_of
from megatron_vlm.config.checks import check_training
from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.data_sources import parse_sets, parse_sources
from megatron_vlm.config.schema import Config, MuonSettings, VideoLimits, key_types
from megatron_vlm.config.searched_keys import SEARCHED
from megatron_vlm.errors import NOT_GIVEN, ConfigError
from tests.support.error_fields import raises
from tests.support.suites import full, quick
from tests.support.tables import in_one_test

DEFAULTS = to_yaml(load_config(["model.path=x"]))


def test_defaults_are_the_dataclasses():
    assert load_config(["model.path=x"]) == Config(model=Config().model.__class__("x"))


RECIPES = sorted(f"{file.parent.name}={file.stem}" for file in config_dir().glob("*/*.yaml"))


# One of each group.
QUICK = {recipe.partition("=")[0]: recipe for recipe in RECIPES}.values()


@pytest.mark.parametrize("recipe", quick(QUICK, RECIPES))
def test_every_recipe_composes(recipe):
    assert load_config([recipe, "model.path=x"]).model.path == "x"


@pytest.mark.full
def test_no_override_ends_in_a_traceback():
    """Values of other kinds are refused, on the command line and in a file, with their key."""
    digits, wrong = "9" * 4301, []
    numbers = ["preference.loss_weights", "embed.dimensions", "eval.recall_at", "log.profile_steps"]
    groups = [("data", "[1,1]"), ("model", "[[a]]"), ("optim", "[null]"), ("lora", "{a: 1}")]
    cases = [*groups, ("~data", "[1,1]"), ("data", "[]"), ("optim.lr", digits), ("run", digits)]
    cases += [("data.columns", f"{{a: {digits}}}"), ("train.steps", "9_" * 4301 + "9")]
    cases.append(("preference.loss_weights", "{a: 1}"))
    for key in ("optim.muon_lr", "optim.beta1", "data.split", "lora.alpha", "rl.failed_reward"):
        cases += [(key, "9" * 400), (key, f"-{'9' * 400}")]
    cases += [("optim.muon", f"{{momentum: {'9' * 400}}}"), ("data.video", f"{{fps: {'9' * 400}}}")]
    odd = ("[[1]]", "[{a: 1}]", "[x]")
    cases += [(key, value) for key in numbers for value in odd]
    basic = ["model.path=x", "train.objective=embed"]
    for key, value in cases:
        group, _, name = key.partition(".")
        text = f"{group}: {{{name}: {value}}}"
        calls = {key.strip("~"): lambda word=f"{key}={value}": load_config([*basic, word])}
        if name:
            calls["my.yaml, line 1: "] = lambda text=text: load_config(
                basic, ConfigFile.parse(text, "my.yaml")
            )
        for place, call in calls.items():
            try:
                call()
                wrong.append(f"{key}={value[:20]} is taken")
            except ConfigError as error:
                wrong += [] if str(error).startswith(place) else [f"{key}={value[:20]}: {error}"]
            except Exception as error:
                wrong.append(f"{key}={value[:20]}: {error!r:.100}")
    assert not wrong, "\n".join(wrong)


def test_a_recipe_recomputes_only_what_saves_memory():
    """`selective` on attention alone keeps what `none` keeps (see test_memory.py)."""
    recipes = [*config_dir().glob("*/*.yaml")]
    assert recipes and [each for each in recipes if "selective" in each.read_text()] == []


def test_a_recipe_sets_what_belongs_together_and_an_override_wins():
    cfg = load_config(["model=qwen3_vl_32b", "model.path=x", "parallel.tp=4"])
    assert (cfg.parallel.tp, cfg.optim.lr, cfg.train.precision) == (4, 5e-6, "bf16")


@in_one_test(
    ("train", "held_out"),
    [
        ("null", "null"),
        ("a.jsonl", "[a/x.jsonl,{path: b/x.jsonl, split: test}]"),
        ("[a.jsonl,{path: b, weight: 2}]", "{charts: a.jsonl, maps: {path: b, subset: c}}"),
        ("{path: hub/set, streaming: true}", "[path.jsonl,b.jsonl]"),
    ],
)
def test_the_resolved_configuration_reads_back(train, held_out):
    overrides = [f"data.train={train}", f"data.eval={held_out}", "eval.candidates=[cat,dog]"]
    overrides.append("data.ignore_keys=[reward,'my score, new']")
    overrides.append("data.template_kwargs={enable_thinking: false}")
    cfg = load_config(["model=tiny_cpu", "model.path=x", "data.train_on=[user]", *overrides])
    assert from_yaml(to_yaml(cfg)) == cfg
    assert cfg.data.train_on == ("user",) and cfg.eval.candidates == ("cat", "dog")
    assert cfg.data.ignore_keys == ("reward", "my score, new")
    assert cfg.data.template_kwargs == {"enable_thinking": False}


PLACEHOLDERS = ["model=qwen3_vl_8b", "model.path=x", "parallel=auto"]


def test_auto_leaves_to_the_planner_what_nobody_gave(tmp_path):
    auto = load_config(PLACEHOLDERS)
    assert auto.parallel.auto == SEARCHED and auto.parallel.tp == 1  # the model's recipe has 4
    assert from_yaml(to_yaml(auto)) == auto
    given = load_config([*PLACEHOLDERS, "parallel.tp=2", "train.micro_batch_size=4"])
    left = set(SEARCHED) - {"parallel.tp", "train.micro_batch_tokens"}
    assert set(given.parallel.auto) == left and given.parallel.tp == 2
    taken_back = load_config([*PLACEHOLDERS, "parallel.tp=2", "~parallel.tp"])
    assert taken_back.parallel.auto == SEARCHED
    file = tmp_path / "own.yaml"
    file.write_text("defaults: [{parallel: auto}]\nparallel: {pp: 2}\nmodel: {path: x}\n")
    in_file = load_config([], ConfigFile.read(str(file)))
    assert "parallel.pp" not in in_file.parallel.auto and in_file.parallel.pp == 2
    layers = load_config([*PLACEHOLDERS, "parallel.layers_per_stage=auto"])
    assert "parallel.layers_per_stage" in layers.parallel.auto
    with raises(ConfigError, key="parallel.virtual_stages", found=2):
        load_config([*PLACEHOLDERS, "parallel.virtual_stages=2"])
    with raises(ConfigError, key="launch.backend", found="ray"):
        load_config([*PLACEHOLDERS, "launch=ray"])
    given = load_config(["model=qwen3_vl_8b", "model.path=x", "parallel.virtual_stages=2"])
    assert given.parallel.auto == ()  # of the model's recipe
    placed = load_config([*PLACEHOLDERS, "launch=ray", "parallel.tp=2"])
    assert placed.parallel.tp == 2 and "parallel.pp" in placed.parallel.auto
    with raises(ConfigError, key="parallel.auto", allowed_has="all, or names"):
        load_config(["model.path=x", "parallel.auto=true"])


def test_a_plus_sets_a_key_and_a_tilde_restores_its_default():
    overrides = ["+optim.lr=2", "+run=there", "~data.train", "~data.video"]
    cfg = load_config(["model.path=x", "data=shapes", "data.video={fps: 1}", *overrides])
    assert (cfg.optim.lr, cfg.run, cfg.data.train) == (2, "there", ())
    assert cfg.data.video == VideoLimits()
    text = to_yaml(load_config(["model.path=x", "data=shapes", "data.video={fps: 1}"]))
    assert from_yaml(text, overrides).data.train == () and from_yaml(text, overrides).optim.lr == 2


def test_a_complete_configuration_takes_no_recipe():
    for recipe in ("data=shapes", "+data=shapes"):
        with raises(ConfigError, key="data", found="shapes", remedy_has="data.KEY=VALUE"):
            from_yaml(DEFAULTS, [recipe])


@in_one_test(
    ("value", "found"),
    [
        ([], NOT_GIVEN),
        ([3], 3),
        ([{"weight": 1}], {"weight": 1}),
        ({"path": 3}, {"path": 3}),
        ([{"path": "a", "wieght": 1}], {"path": "a", "wieght": 1}),
    ],
)
def test_what_is_no_source(value, found):
    with raises(ConfigError, key="data.train", found=found):
        parse_sources(value, "data.train")


@in_one_test(
    ("name", "found"),
    [
        *(("weight", value) for value in (0, 1000, "high", True)),
        ("image_root", 5),
        *(("split", value) for value in (2020, None)),
        ("subset", ["a"]),
        ("columns", {"photo": "image"}),
        ("roles", {"user": 3}),
        ("revision", 1.5),
        ("streaming", "no"),
    ],
)
def test_wrong_options_of_a_source(name, found):
    with raises(ConfigError, place="x", key=f"data.train.{name}", found=found):
        parse_sources({"path": "x", name: found}, "data.train")


def test_columns_and_roles_survive_the_saved_configuration():
    """Those of an entry, too, and its path may name a set that dataset_info.json describes."""
    entry = {"path": "a", "columns": {"image": "photo"}, "roles": {"user": ["me", "you"]}}
    cfg = load_config(
        [
            *("model.path=x", "data.columns={content: says, text: q}", "data.roles={user: me}"),
            "data.train=[{path: a, columns: {image: photo}, roles: {user: [me, you]}},b/c.json:d]",
            "data.eval=[b/c.json:d,b/c.json:e]",
        ]
    )
    assert cfg.data.train == parse_sources([entry, "b/c.json:d"], "data.train")
    assert [held_out.name for held_out in cfg.data.eval] == ["d", "e"]
    assert (cfg.data.columns, cfg.data.roles) == ({"content": "says", "text": "q"}, {"user": "me"})
    assert from_yaml(to_yaml(cfg)) == cfg
    assert from_yaml(to_yaml(cfg), ["~data.columns"]).data.columns == {}


def test_evaluation_sets_have_names():
    def names(value):
        return [(held_out.name, held_out.source.path) for held_out in parse_sets(value)]

    assert names("a/held.jsonl.gz") == [("held", "a/held.jsonl.gz")]
    assert names(["a/x.jsonl", "b/x.jsonl"]) == [("x-0", "a/x.jsonl"), ("x-1", "b/x.jsonl")]
    charts = {"charts": "a.jsonl", "maps": {"path": "b.jsonl"}}
    assert names(charts) == [("charts", "a.jsonl"), ("maps", "b.jsonl")]
    for sources in (["a", "b"], None):
        with raises(ConfigError, key="data.eval.x", problem_has=len(sources or ())):
            parse_sets({"x": sources})


def test_training_is_refused_before_anything_heavy_is_imported():
    best = {"key": "checkpoint.best"}
    cases = [
        ([], {"key": "data.train", "remedy_has": "data.train=FILE"}),
        (["data.train={path: a, streaming: true}"], {"key": "train.steps"}),
        (["data.train=a", "checkpoint.best=eval/loss"], {**best, "remedy_has": "none"}),
        (["data=shapes", "checkpoint.best=x/loss"], {**best, "remedy_has": "eval"}),
    ]
    commands, messages = [["model.path=nowhere", *given] for given, _ in cases], []
    for arguments, (_, expected) in zip(commands, cases, strict=True):
        with raises(ConfigError, **expected) as caught:
            check_training(load_config(arguments))
        messages.append(f"{caught.value} False")
    code = (
        "import sys\nfrom megatron_vlm.train import run_train\n"
        f"for arguments in {commands}:\n"
        "    try: run_train(arguments)\n"
        "    except ValueError as error: print(error, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == messages, done.stdout + done.stderr


MUON_ALONE, TWICE = {"remedy_has": "optim.name=muon"}, {"problem_has": "'a' more than once"}
MISTAKES = [
    ("modle.path=y", "modle.path", NOT_GIVEN, {"remedy_has": "'model.path'"}),
    ("parallel.tpp=2", "parallel.tpp", NOT_GIVEN, {"remedy_has": "'parallel.tp'"}),
    ("hydra.run.dir=x", "hydra.run.dir", NOT_GIVEN, {"remedy_has": "run="}),
    ("hydra.searchpath=[file:///tmp]", "hydra.searchpath", NOT_GIVEN, {}),
    ("+hydra/launcher=joblib", "hydra/launcher", NOT_GIVEN, {}),
    ("model@x=qwen3_vl_2b", "model@x", NOT_GIVEN, {}),
    ("optim.lr=1e-5,2e-5", "optim.lr", "1e-5,2e-5", {"remedy_has": "optim.lr=[1e-5,2e-5]"}),
    ("optim.lr=choice(1,2)", "configuration", NOT_GIVEN, {"problem_has": "'optim.lr=choice(1,2)'"}),
    ("+train.step=1", "train.step", NOT_GIVEN, {"remedy_has": "'train.steps'"}),
    ("model=qwen4", "model", "qwen4", {"remedy_has": "qwen3_vl_2b"}),
    ("optim.schedule=cosin", "optim.schedule", "cosin", {"allowed_has": "'linear', 'cosine'"}),
    ("train.global_batch_size=0", "train.global_batch_size", 0, {"allowed": "at least 1"}),
    ("optim.name=lion", "optim.name", "lion", {"allowed_has": "'adamw', 'muon'"}),
    ("optim.muon={ns_steps: 100}", "optim.muon.ns_steps", 100, {"allowed": "1 to 99"}),
    ("optim.muon={steps: 5}", "optim.muon", NOT_GIVEN, {"allowed_has": "momentum, nesterov, ns_"}),
    ("optim.muon={ns_steps: 4}", "optim.muon", MuonSettings(ns_steps=4), MUON_ALONE),
    ("data.video={fps: fast}", "data.video.fps", "fast", {"allowed": "a number"}),
    ("data.video={max_frames: 1}", "data.video.max_frames", 1, {"allowed": "at least 2, or null"}),
    ("data.video=3", "data.video", NOT_GIVEN, {"problem": "is not a mapping"}),
    ("optim.muon_lr=0.02", "optim.muon_lr", 0.02, MUON_ALONE),
    ("data.train_on=[robot]", "data.train_on", ("robot",), {"allowed_has": "all_assistant"}),
    ("data.train=[a,{path: b, streaming: true}]", "data.train", NOT_GIVEN, {}),
    (
        "data.train=[{path: a, streaming: true, image_root: x},{path: b, streaming: true}]",
        "data.train",
        NOT_GIVEN,
        {"problem_has": "image_root, and these have ., x"},
    ),
    ("data.eval={path: a, streaming: true}", "data.eval", "a", {}),
    ("data.columns=photo", "data.columns", "photo", {"allowed_has": "{image: photo"}),
    ("data.columns={image: 3}", "data.columns", {"image": 3}, {}),
    (
        "data.columns={photo: image}",
        "data.columns",
        {"photo": "image"},
        {"problem_has": "'photo' is not a field", "remedy_has": "{image: photo}"},
    ),
    ("data.columns={imgs: a}", "data.columns", {"imgs": "a"}, {"allowed_has": "'images'"}),
    ("data.columns={image: a, text: a}", "data.columns", NOT_GIVEN, TWICE),
    ("data.roles={user: []}", "data.roles", {"user": []}, {"allowed_has": "customer"}),
    ("data.roles={human: a}", "data.roles", {"human": "a"}, {"allowed_has": "'assistant'"}),
    ("data.roles={user: [a], assistant: a}", "data.roles", NOT_GIVEN, TWICE),
    ("eval.candidates=[cat,cat]", "eval.candidates", NOT_GIVEN, {"allowed_has": "2"}),
    ("eval.candidates=7", "eval.candidates", 7, {}),
    ("log.profile_steps=[3]", "log.profile_steps", [3], {"allowed_has": "[10,12]"}),
    ("checkpoint.best=loss", "checkpoint.best", "loss", {"allowed_has": "SET/SCORE"}),
    ("parallel.tp=two", "parallel.tp", "two", {"allowed": "a whole number"}),
]


# Each takes a tenth of a second.
@pytest.mark.parametrize("part", [0, full(1)])
def test_mistakes(part):
    @in_one_test(("override", "key", "found", "more"), MISTAKES[part::2])
    def check(override, key, found, more):
        with raises(ConfigError, key=key, found=found, **more):
            load_config(["model.path=x", override])
        with pytest.raises(ConfigError):
            from_yaml(DEFAULTS, [override])

    check()


@pytest.mark.parametrize("form", ["run=${{oc.env:{0}}}", "model.path='a${{oc.env:{0}}}'"])
def test_a_variable_is_never_written_into_a_run(form, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "of nobody else")
    override = form.format("SECRET_TOKEN")
    saved = DEFAULTS.replace("path: x", "path: ${oc.env:HOME}")
    for load in (lambda: load_config(["model.path=x", override]), lambda: from_yaml(saved)):
        with raises(ConfigError, problem_has="${...}") as caught:
            load()
        assert "of nobody else" not in str(caught.value)


@pytest.mark.parametrize("marks", ["[]", "{a:}", "{[}]", "()"])
def test_what_is_nested_too_deeply_is_refused(marks):
    opening, closing = marks[: (len(marks) + 1) // 2], marks[(len(marks) + 1) // 2 :]
    opening, closing = {"()": ("choice(", ")")}.get(marks, (opening, closing))
    text = f"data.template_kwargs={opening * 500}1{closing * 500}"
    for load in (lambda: load_config(["model.path=x", text]), lambda: from_yaml(DEFAULTS, [text])):
        with raises(ConfigError, key="data.template_kwargs", problem_has=32):
            load()
    deep = "{a:" * 31 + "1" + "}" * 31
    assert load_config(["model.path=x", f"data.template_kwargs={deep}"]).data.template_kwargs["a"]


@pytest.mark.parametrize("load", [load_config, lambda given: from_yaml(DEFAULTS, given)])
def test_settings_with_more_letters_than_are_read_are_refused(load):
    """What Hydra takes to read a list grows with the square of its length."""
    given = ["model.path=x", "run=a", "data.train="]
    given[-1] += "a" * (2**15 - sum(map(len, given)))
    assert load(given).run == "a"
    with raises(ConfigError, key="data.train", problem_has="32,769", remedy_has="--config"):
        load([*given[:2], f"{given[-1]}a"])


def test_a_missing_path_is_named():
    with raises(ConfigError, key="model.path", remedy_has="model.path=VALUE"):
        load_config([])


GROUPS = {item.name: item.type for item in fields(Config) if is_dataclass(item.type)}
RANGES = {
    f"{group}.{name}": allowed
    for group, cls in GROUPS.items()
    for name, kind in get_type_hints(cls, include_extras=True).items()
    for allowed in ranges_of(kind)
}


def _parts(kind: Any) -> set[Any]:
    return {kind}.union(*map(_parts, get_args(kind)))


def test_every_number_has_a_range():
    numbers = {key for key, kind in key_types().items() if _parts(kind) & {int, float}}
    assert set(RANGES) == numbers


@in_one_test("key", RANGES)
def test_what_is_out_of_range_is_refused_and_the_ends_are_not(key):
    allowed, kind = RANGES[key], key_types()[key]
    listed = key.endswith(("layers_per_stage", "profile_steps", "loss_weights", "mask_weight"))
    whole = float not in _parts(kind)

    group, _, name = key.partition(".")

    def check(value: float) -> None:
        number: Any = int(value) if whole else value
        number = [number] if listed else number
        cfg = Config()
        check_bounds(replace(cfg, **{group: replace(getattr(cfg, group), **{name: number})}))

    outside = [allowed.min - 1, allowed.max + 1, -1e9]
    outside += [] if whole else [math.inf, -math.inf, math.nan]
    outside += [allowed.min] * allowed.is_min_open + [allowed.max] * allowed.is_max_open
    for value in outside:
        with pytest.raises(ConfigError) as caught:
            check(value)
        or_null = ", or null" * (type(None) in _parts(kind))
        assert (caught.value.key, caught.value.allowed) == (key, f"{allowed}{or_null}")
    check(0.5 if allowed.is_min_open else allowed.min)


@pytest.mark.full
@in_one_test(
    ("overrides", "key", "words"),
    [
        ("eval.every='0 epochs'", "eval.every", "0.5 epochs"),
        ("checkpoint.every=1.5", "checkpoint.every", "0.5 epochs"),
        ("checkpoint.every=true", "checkpoint.every", "0.5 epochs"),
        ("eval.every='half an epoch'", "eval.every", "0.5 epochs"),
        ("data.split=1.5", "data.split", "whole number"),
        ("data.split=3 data.eval=b.jsonl", "data.split", "data.eval=null"),
        ("data.split=3 data.train={path: a, streaming: true}", "data.split", "is a stream"),
        ("eval.every='1 epoch' data.train={path: a, streaming: true}", "eval.every", "=N"),
        ("train.early_stopping=2", "train.early_stopping", "checkpoint.best=b/loss"),
        ("train.early_stopping=2 checkpoint.best=b/loss", "train.early_stopping", "fixed steps"),
        ("train.early_stopping_delta=1", "train.early_stopping_delta", "no effect"),
        ("checkpoint.export_from=best", "checkpoint.export_from", "SET/SCORE"),
        (
            "checkpoint.export_from=best checkpoint.best=b/loss checkpoint.export=false",
            "checkpoint.export_from",
            "change one",
        ),
        ("eval.metrics=[anls,bleu]", "eval.metrics", "bleu is no metric"),
        ("eval.metrics=[anls,anls]", "eval.metrics", "the name anls"),
        ("eval.metrics=[nowhere.py:loss]", "eval.metrics", "the name loss"),
        ("eval.metrics=[nowhere.py:blind_loss]", "eval.metrics", "the name blind_loss"),
        ("eval.blind=true train.objective=dpo", "eval.blind", "compares whole examples"),
        ("eval.metrics=nowhere.py:score", "eval.metrics", "no file nowhere.py"),
        ("eval.metrics=my.py:", "eval.metrics", "FILE.py:NAME"),
        ("checkpoint.best=b/anls", "checkpoint.best", "others need eval.metrics"),
        ("checkpoint.best=held_out/loss", "checkpoint.best", "it has b"),
    ],
)
def test_measurements_that_cannot_be_made(overrides, key, words):
    given = re.split(r" (?=\w+\.)", overrides)
    fixed = ["model.path=x", "data.train=a.jsonl", "train.steps=3"]
    if not any(word.startswith("data.") for word in given):
        fixed.append("data.eval=b.jsonl")
    with raises(ConfigError, key=key) as caught:
        check_training(load_config([*fixed, *given]))
    assert words in str(caught.value)


def test_measurements_that_can_be_made(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("")
    words = [f"eval.metrics=[iou,{own}:score]", "data.split=0.1", "eval.every=0.5 epochs"]
    words += ["train.early_stopping=2", "checkpoint.export_from=best", "data.train=a.jsonl"]
    for score in ("iou_accuracy", "score", "score_f1"):
        cfg = load_config(["model.path=x", f"checkpoint.best=held_out/{score}", *words])
        check_training(cfg)
        assert from_yaml(to_yaml(cfg)) == cfg
