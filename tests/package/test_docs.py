# .venv/bin/python -m pytest tests/package/test_docs.py
"""Checks of the docs: links resolve, messages are those of the program, commands are accepted, and
the quickstart is run (by tests/package/test_wheel.py).

Kinds of the blocks of README.md and docs/*.md, by the words after the fence:

    bash            commands whose words must be known to the program
    bash test       commands that are also run, in order; `# writes PATH ...` names files that must
                    exist afterwards
    python test     code that is run among them
    text            messages of the program, separated by blank lines
"""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron_vlm.cli.parser import make_parser
from megatron_vlm.config import ConfigFile, config_dir, from_yaml, load_config, to_yaml
from megatron_vlm.config.arguments import parse_arguments
from megatron_vlm.config.schema import Config
from tests.support import error_messages

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "skills").glob("*/SKILL.md")),
]
STRINGS = (ast.Constant, ast.JoinedStr, ast.BinOp)
FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# Programs of other packages, whose words are not checked.
FOREIGN = (
    "cd docker export git head hf llama-quantize llama-server make nvidia-smi pip python3 ray "
    "rsync source uv uvx vllm"
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*kinds: str) -> list[Block]:
    all_blocks = []
    for page in PAGES:
        content = page.read_text()
        for match in FENCE.finditer(content):
            line = content.count("\n", 0, match.start()) + 1
            all_blocks.append(Block(page, line, match[1], textwrap.dedent(match[2])))
    return [block for block in all_blocks if not kinds or block.kind in kinds]


def notebook_cells(kind: str) -> list[str]:
    """Return the cells of one kind of the notebook, with each command in one line."""
    cells = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]
    return [text.replace("\\\n", " ") for text in texts]


def test_every_block_is_of_a_known_kind():
    kinds = {"bash", "bash test", "python", "python test", "text", "json", "yaml"}
    assert {block.kind for block in blocks()} <= kinds
    assert {"bash test", "python test", "text"} <= {block.kind for block in blocks()}


# Links.


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    prose = FENCE.sub("", page.read_text())
    for target in re.findall(r'(?:\]\(|src(?:set)?=")([^)"\s]+)[)"]', prose):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_the_site_needs_no_network():
    """The search from disk needs a script, which the theme would load from the network."""
    settings = (ROOT / "mkdocs.yml").read_text()
    [script] = re.findall(r"polyfills: \[(.*?)\]", settings)
    assert "iframe-worker" in script and (ROOT / "docs" / script).exists()


def test_the_site_has_the_skills(monkeypatch, tmp_path):
    """llms.txt lists them, and their links lead to pages of the site."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    lines = [*importlib.import_module("docs_site").write_skills(tmp_path)]
    skills = sorted((ROOT / "skills").glob("*/SKILL.md"))
    assert len(lines) == len(skills) >= 5
    for line, skill in zip(lines, skills, strict=True):
        name = skill.parent.name
        assert line.startswith(f"- [{name}](skills/{name}/SKILL.md): ") and len(line) > 100
        copied = tmp_path / "skills" / name / "SKILL.md"
        for target in re.findall(r"\]\(([^)#]+)", copied.read_text()):
            page = (copied.parent / target).resolve().relative_to(tmp_path.resolve())
            assert (ROOT / "docs" / page).exists() or (ROOT / page).exists()


def test_links_of_the_notebook_resolve():
    targets = re.findall(r"\]\(([^)\s]+)\)", "\n".join(notebook_cells("markdown")))
    assert targets
    assert all((ROOT / "docs" / target).exists() for target in targets), targets


def test_paths_in_code_exist():
    """Paths such as `tests/x.py` and `scripts/y.sh` exist wherever the pages name them."""
    folders = "|".join(("benchmarks", "configs", "docs", "megatron_vlm", "scripts", "tests"))
    path = re.compile(rf"`((?:{folders})/[\w./-]+)`")
    named = [(page.name, name) for page in PAGES for name in path.findall(page.read_text())]
    assert named and [each for each in named if not (ROOT / each[1]).exists()] == []


# Messages.


@cache
def templates() -> set[str]:
    """Return each string of the package that is long enough to be a message, with a null character
    in place of each inserted value."""
    modules = error_messages.trees()
    classes = error_messages.error_classes(modules)
    texts = set()
    for tree in modules.values():
        calls = error_messages.calls(tree, classes)
        texts |= {error_messages.message(call) for _, _, call in calls}
        strings = (each for each in ast.walk(tree) if isinstance(each, STRINGS))
        texts |= {error_messages.template(each) for each in strings}
    texts = {_without_braces(text) for text in texts}
    long_enough = (text for text in texts if len(text) - text.count("\0") >= 12)
    return {" ".join(text.split()) for text in long_enough}


def matches(template: str, message: str) -> bool:
    """Return whether the message is the template with anything in place of each null character."""
    pieces = template.split("\0")
    if not all(piece in message for piece in pieces):  # which is much faster to ask
        return False
    return bool(re.fullmatch(".+".join(map(re.escape, pieces)), message, re.DOTALL))


def _without_braces(text: str) -> str:
    """Return the text with a null character in place of each `{expression}`."""
    result, depth = "", 0
    for sign in text:
        result += "\0" * (sign == "{" and not depth) + sign * (sign not in "{}" and not depth)
        depth += (sign == "{") - (sign == "}")
    return result


def is_said(message: str) -> bool:
    """Return whether the program can print the message, in one piece or joined from pieces that it
    prints: a refusal is KEY=VALUE: reason; remedy."""
    if any(matches(template, message) for template in templates()):
        return True
    if re.fullmatch(r"[\w.]+=\S+|ranks? [\d-]+|\w+\.jsonl:\d+", message):
        return True
    for cut in re.finditer(r"[:;] ", message):
        head, tail = message[: cut.start()], message[cut.end() :]
        if is_said(head) and is_said(tail):
            return True
    return False


def messages() -> Iterator[tuple[str, str]]:
    for block in blocks("text"):
        for message in re.split(r"\n\s*\n", block.text.strip()):
            yield block.where, " ".join(message.split())


def test_messages_are_the_programs():
    entries = list(messages())
    assert len(entries) > 20
    wrong = [f"{where}: {message}" for where, message in entries if not is_said(message)]
    assert not wrong, "\n".join(wrong)


def test_a_message_that_nobody_says_is_found():
    assert is_said("step 3: loss nan, gradient norm nan: not applied (1 so far)")
    assert is_said(
        "model.freeze_language=true: vision, merger and language are all frozen: nothing is left "
        "to train; unfreeze one of them"
    )
    assert not is_said("parallel.tp=16 will not divide the model's num_key_value_heads=8")
    assert not is_said("step 3: loss nan, gradient norm nan: not used (1 so far)")


# Commands.


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without comments and leading environment variables."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


@cache
def composed(*words: str) -> Config:
    return load_config([*words])


def check_train(words: list[str]) -> None:
    has_path = any(word.startswith("model.path=") for word in words)
    composed(*words, *([] if has_path else ["model.path=x"]))


def check_megatron_vlm(words: list[str]) -> None:
    args = parse_arguments(make_parser(), words)  # raises SystemExit for an unknown option
    overrides = getattr(args, "overrides", [])
    if not hasattr(args, "where"):
        check_train(overrides)
    elif args.where.startswith("runs/") or "/step-" in args.where:  # has its own configuration
        from_yaml(to_yaml(composed("model.path=x", "data.eval=x")), overrides)
    else:
        check_train(overrides)


def check_torchrun(words: list[str]) -> None:
    args = get_args_parser().parse_args(words)
    if args.module:
        assert args.training_script == "megatron_vlm.train"
        check_train(args.training_script_args)
    else:
        assert (ROOT / args.training_script).exists(), args.training_script


def check_command(words: list[str]) -> None:
    program = words[0]
    if program == "megatron-vlm":
        check_megatron_vlm(words[1:])
    elif program == "torchrun":
        check_torchrun(words[1:])
    elif program.startswith("scripts/"):
        assert (ROOT / program).exists(), program
        check_train(words[1:])
    elif program == ".venv/bin/python":
        assert (ROOT / words[-1]).exists(), words
    elif program == "python" and words[1] == "-m":
        assert words[2] == "megatron_vlm.train", words
        check_train(words[3:])
    elif program == "python":
        options = re.findall(r'"(--[\w-]+)"', (ROOT / words[1]).read_text())
        assert {word for word in words if word.startswith("--")} <= set(options), words
    else:
        assert program in FOREIGN.split(), program


COMMANDS = blocks("bash", "bash test")


@pytest.mark.parametrize("block", COMMANDS, ids=[block.where for block in COMMANDS])
def test_commands_are_understood(block):
    for words in command_lines(block.text):
        try:
            check_command(words)
        except SystemExit as error:
            raise AssertionError(f"{block.where}: {shlex.join(words)}") from error


def test_commands_of_the_notebook_are_understood():
    lines = "\n".join(notebook_cells("code")).splitlines()
    commands = [*command_lines("\n".join(line[1:] for line in lines if line.startswith("!")))]
    assert commands
    for words in commands:
        check_command(words)


def test_the_notebook_holds_no_outputs():
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = re.compile(r"(?:^    |`)make ([\w-]+)", re.MULTILINE)
    named = [(page.name, name) for page in PAGES for name in command.findall(page.read_text())]
    assert named and [each for each in named if each[1] not in targets] == []


# Configuration.


def test_the_tables_of_the_configuration_are_up_to_date(monkeypatch):
    """Outdated tables are rewritten by: python scripts/make_config_docs.py"""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    maker = importlib.import_module("make_config_docs")
    page = maker.PAGE.read_text()
    assert maker.with_tables(page) == page


def test_recipes_of_the_docs_compose(tmp_path, monkeypatch):
    """Each block is the recipe that its first line names, and composes with the existing ones."""
    written = []
    for block in blocks("yaml"):
        if block.page.name == "coming-from.md" or block.text.startswith("# my.yaml"):
            continue
        name = re.search(r"# configs/(\w+)/(\w+)\.yaml", block.text)
        assert name, block.where
        written.append(f"{name[1]}={name[2]}")
        for folder in config_dir().iterdir():
            if folder.is_dir() and not (tmp_path / folder.name).exists():
                (tmp_path / folder.name).symlink_to(folder)
        target = tmp_path / name[1]
        target.unlink()
        target.mkdir()
        for file in (config_dir() / name[1]).iterdir():
            (target / file.name).symlink_to(file)
        (target / f"{name[2]}.yaml").write_text(block.text)
    (tmp_path / "train.yaml").symlink_to(config_dir() / "train.yaml")
    for module in ("load", "key_hints"):
        monkeypatch.setattr(f"megatron_vlm.config.{module}.config_dir", lambda: tmp_path)
    assert written
    load_config([*written, "model.path=x"])


def test_the_file_of_the_docs_is_read():
    (block,) = (block for block in blocks("yaml") if block.text.startswith("# my.yaml"))
    cfg = load_config(["optim.lr=1e-5"], ConfigFile.parse(block.text, "my.yaml"))
    assert (cfg.optim.lr, cfg.train.epochs, cfg.log.trackers) == (1e-5, 2, ("tensorboard",))
    assert (cfg.data.max_tokens, len(cfg.data.train), cfg.run) == (8192, 2, "runs/receipts")


# Execution of the quickstart: see test_wheel.py.


def run_block(block: Block, folder: Path, python: Path) -> str:
    """Return the output of the block, run by a user in the environment of `python`."""
    job_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in job_variables}
    env |= {
        "PATH": f"{python.parent}:{env['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),  # data.cache_dir lies in it
    }
    words = ["bash", "-euo", "pipefail", "-c", block.text]
    if block.kind == "python test":
        words = [str(python), "-c", block.text]
    done = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, f"{block.where}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    for promise in re.findall(r"# writes (.*)", block.text):
        for name in promise.split():
            assert (folder / name).exists(), f"{block.where} promises {name}"
    return done.stdout
