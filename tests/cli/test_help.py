# .venv/bin/python -m pytest tests/cli/test_help.py
"""Help in the terminal: every key is explained, and every example can be pasted."""

import inspect
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from megatron_vlm.cli import main
from megatron_vlm.cli.completion import SHELLS, complete_line
from megatron_vlm.cli.parser import make_parser
from megatron_vlm.config.key_docs import explain_topic, key_docs, recipe_docs
from megatron_vlm.config.other_trainers import OTHER_SENTENCES, SAME_KEYS
from megatron_vlm.config.schema import leaves

METAVARS = "N X NAME NAME=VALUE TEXT FILE DIR PATH SIZE LIST PYTHON KEY"
(COMMANDS,) = (action.choices for action in make_parser()._actions if action.choices)


@pytest.fixture
def ask(capsys, monkeypatch):
    """Return a function that runs a command and returns what it prints."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str) -> str:
        try:
            assert main(list(words)) == 0
        except SystemExit as ended:
            assert ended.code == 0
        return capsys.readouterr().out

    return run


def test_every_key_is_explained():
    assert list(key_docs()) and set(key_docs()) == set(leaves())
    for key, doc in key_docs().items():
        assert doc.meaning, key
        assert explain_topic(key).startswith(f"{key}: ")


def test_names_of_other_trainers_lead_to_the_key():
    for key, names in SAME_KEYS.items():
        for name in names.split():
            assert f"\n{key}: " in explain_topic(name), name
    for name, text in OTHER_SENTENCES.items():
        assert text in " ".join(explain_topic(name).split()), name


@pytest.mark.parametrize(
    ("topic", "has"),
    [
        ("optim.lr", ["peak learning rate", "float", "1e-05", "0 or more", "learning_rate"]),
        ("optim.schedule", ["constant | linear | cosine | wsd", "lr_scheduler_type"]),
        ("optim", ["AdamW", "optim=frozen_vision", "optim.clip_grad=1"]),
        ("lr", ["optim.lr=", "optim.vision_lr=", "optim.min_lr_ratio="]),
        ("learning rate", ["optim.lr=", "optim.merger_lr="]),
        ("train.", ["train.steps="]),
        ("lora=all", ["lora.rank=16"]),
        ("parallel.tp", ["2 by", "tensor_model_parallel_size"]),
        ("train", ["usage: megatron-vlm train", "megatron-vlm help train."]),
        ("push", ["usage: megatron-vlm push"]),
    ],
)
def test_topics(topic, has, ask):
    text = " ".join(ask("help", topic).split())
    for words in has:
        assert words in text, text
    if topic not in COMMANDS:
        assert " ".join(ask("--help", topic).split()) == text or "=" in topic
        assert " ".join(ask("train", "--help", topic).split()) == text or "=" in topic


def test_help_of_a_line_that_has_keys_is_that_of_the_command(ask):
    assert ask("train", "--help", "model.path=x") == ask("train", "--help")
    assert "train.steps=" in ask("train", "--help", "train") != ask("help", "train")


@pytest.mark.parametrize(
    ("topic", "remedy"),
    [("trian", "did you mean train?"), ("zzz", "the groups of keys are model, lora")],
)
def test_an_unknown_topic_is_refused(topic, remedy, capsys):
    assert main(["help", topic]) == 2
    assert f"{topic} is neither a command nor a key; {remedy}" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_can_be_pasted(command, ask):
    """The example has the words of the docstring, over lines that a shell joins again."""
    run = COMMANDS[command].get_default("run")
    written = re.search(r"example: (.*?)(\n\n|$)", inspect.cleandoc(run.__doc__), re.DOTALL)
    shown = re.search(r"example:\n(.*?)(\n\n|$)", ask(command, "--help"), re.DOTALL)
    assert (written is None) == (shown is None)
    if shown is not None:
        words = shlex.split(shown[1].replace("\\\n", " "))
        assert words == shlex.split(written[1])
        assert "megatron-vlm" in shown[1] and command in words
        assert max(map(len, shown[1].splitlines())) < 80


@pytest.mark.parametrize("command", COMMANDS)
def test_options_say_what_they_take(command, ask):
    text = ask(command, "--help")
    assert "(default: None)" not in text and "(default: False)" not in text
    for action in COMMANDS[command]._actions:
        is_valued = action.option_strings and action.nargs != 0 and not action.choices
        if is_valued and action.help != "==SUPPRESS==":
            names = action.metavar if isinstance(action.metavar, tuple) else (action.metavar,)
            assert {*names} <= {*METAVARS.split()}, action.option_strings
        if action.required and action.option_strings:
            assert f"{action.help} (required)" in " ".join(text.split())


@pytest.mark.parametrize("command", ["train", "rl", "serve"])
def test_recipes_and_keys_are_listed(command, ask):
    """The default of lora is chosen by name, too: a run without a recipe of lora has none."""
    text = ask(command, "--help")
    assert "qwen3_vl_2b" in text and re.search(r"^    model\. .*path", text, re.MULTILINE)
    assert ("lora=        all default none qlora vision" in text) == (command != "serve")
    assert ("    rl.  " in text) == (command == "rl")
    assert "model:\n  path: x\n" in ask(command, "--cfg", "job", "model.path=x")


def test_recipes_are_named_with_what_they_set():
    by_choice = {recipe.choice: recipe for recipe in recipe_docs()}
    assert by_choice["lora=default"].values["lora.rank"] == "16"
    assert "model=default" not in by_choice


LINES = {
    "megatron-vlm tra": ["train"],
    "megatron-vlm train --dry": ["--dry-run"],
    "megatron-vlm train --cfg ": ["job"],
    "megatron-vlm train lora=": [
        f"lora={n}" for n in ["all", "default", "none", "qlora", "vision"]
    ],
    "megatron-vlm train mode": ["model=", "model."],
    "megatron-vlm train model=tiny_cpu optim.wa": ["optim.warmup_steps=", "optim.warmup_ratio="],
    "megatron-vlm rl rl.loss=c": ["rl.loss=cispo"],
    "megatron-vlm eval runs/x log.report=": ["log.report=true", "log.report=false"],
    "megatron-vlm eval ru": [],
    "megatron-vlm train ru": ["run="],
    "megatron-vlm plan model.path=": [],
    "megatron-vlm push ": [],
    "megatron-vlm chat runs/x --platform c": ["cuda", "cpu"],
    "megatron-vlm help optim.l": ["optim.lr"],
    "megatron-vlm completion ": [],
}


@pytest.mark.parametrize("line", LINES)
def test_lines_are_completed(line):
    assert list(complete_line(line, COMMANDS)) == LINES[line]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path):
    """bash splits words at =, and receives what follows that sign. One process answers for all
    lines, as the command would for each."""
    program = tmp_path / "megatron-vlm"
    answers = {line: "".join(f"{each}\n" for each in wanted) for line, wanted in LINES.items()}
    program.write_text(
        f"#!{sys.executable} -S\nimport sys\n"
        f"print({answers!r}[sys.argv[2].removeprefix('--line=')], end='')\n"
    )
    program.chmod(0o755)
    ask = "".join(
        f"COMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}\n"
        f'COMP_WORDS=({program}); _megatron_vlm; echo "${{COMPREPLY[*]}}"\n'
        for line in LINES
    )
    done = subprocess.run(
        ["bash", "-c", f"{SHELLS['bash']}{ask}"], capture_output=True, text=True, check=True
    )
    for line, said in zip(LINES, done.stdout.splitlines(), strict=True):
        before = line.split(" ")[-1].partition("=")[0] + "="
        assert said.split() == [each.removeprefix(before) for each in LINES[line]], line


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_printed_and_parsed(shell, ask):
    script = ask("completion", shell)
    assert "completion --line=" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)
