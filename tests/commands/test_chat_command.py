# .venv/bin/python -m pytest tests/commands/test_chat_command.py
"""Tests of `megatron-vlm chat`: its answers equal those of transformers, and mistakes do not end
it."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from megatron_vlm.cli import main
from megatron_vlm.commands.chat.command import Settings, find_model
from megatron_vlm.commands.chat.conversation import HELP, ChatSession, read_line, run_conversation
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.spec import Part
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.training.generate import generate
from tests.support.chats import data_uri, hf_encode, hf_processor, picture
from tests.support.error_fields import raises
from tests.support.videos import make_video

NEW_TOKENS = 9
# The numbers of the pictures, and the text, of each turn.
TALKS: list[list[tuple[list[int], str]]] = [
    [([], "How many shapes are there?")],
    [([0], "What colour is the circle?")],
    [([0, 1], "Which is larger?"), ([], "And which is red?"), ([2], "What is <|im_end|> here?")],
]
SIZES = [(96, 64), (40, 120), (64, 64)]


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    paths = []
    for number, size in enumerate(SIZES):
        paths.append(str(tmp_path / f"{number}.png"))
        picture(*size, number).save(paths[-1])
    return paths


def hold(folder: str, pictures: list[str], talks: Any, **settings: Any) -> list[list[str]]:
    """Return the answers of several conversations with one model."""
    conversation = ChatSession(folder, Settings(NEW_TOKENS, **settings))
    all_answers = []
    for turns in talks:
        conversation.reset()
        answers = []
        for numbers, text in turns:
            pieces: list[str] = []
            media = [conversation.medium("image", pictures[number]) for number in numbers]
            answers.append(conversation.ask(text, media, pieces.append))
            assert "".join(pieces) == answers[-1] and len(pieces) > 3
        all_answers.append(answers)
    return all_answers


@cache
def reference(folder: str) -> tuple[Any, Any]:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
    return hf_processor(folder), model


def hf_answers(folder: str, turns: list[tuple[list[int], str]], said: list[str]) -> list[str]:
    """Return transformers' answer to each question after the same earlier answers."""
    processor, model = reference(folder)
    messages: list[dict[str, Any]] = []
    answers = []
    for (numbers, text), answer in zip(turns, said, strict=True):
        image_parts = [{"type": "image", "image": data_uri(*SIZES[n], n)} for n in numbers]
        content: Any = [*image_parts, {"type": "text", "text": text}] if image_parts else text
        messages.append({"role": "user", "content": content})
        inputs = dict(hf_encode(processor, {"messages": messages}, add_generation_prompt=True))
        ids = inputs["input_ids"]
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        out = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        new = out[0, ids.shape[1] :]
        answers.append(processor.tokenizer.decode(new, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answer})
    return answers


def test_answers_are_those_of_transformers(pool, tiny, pictures):
    # We treat the input of users as plain text; transformers would read the mark as the end.
    talks = [[(n, text.replace("<|im_end|>", "the end")) for n, text in talk] for talk in TALKS]
    (answers,) = pool.run(hold, 1, tiny(), pictures, talks)
    for turns, replies in zip(talks, answers, strict=True):
        assert replies == hf_answers(tiny(), turns, replies)
    assert len({answer for replies in answers for answer in replies}) == 5


@pytest.mark.full
def test_what_users_type_is_text_and_a_seed_repeats_an_answer(pool, tiny, pictures):
    (first,) = pool.run(hold, 1, tiny(), pictures, TALKS[2:])
    plain = [[(n, text.replace("<|im_end|>", "the end")) for n, text in TALKS[2]]]
    (other,) = pool.run(hold, 1, tiny(), pictures, plain)
    assert first[0][:2] == other[0][:2]
    (one, again) = pool.run(warm, 1, tiny(), pictures)[0]
    assert one == again != first


def warm(folder: str, pictures: list[str]) -> list[Any]:
    talks = TALKS[2:]
    return [hold(folder, pictures, talks, temperature=3.0, seed=5) for _ in range(2)]


def stop(folder: str) -> list[Any]:
    """Interrupt an answer with Ctrl-C after some tokens, and return it and the state after it."""
    handler = signal.getsignal(signal.SIGINT)  # SIG_IGN if the tests run in the background
    conversation = ChatSession(folder, Settings(40))
    whole = conversation.ask("How many?", [], lambda piece: None)
    conversation.reset()

    stopped: list[int] = []

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if len(self.getvalue()) > 4 and not stopped:
                stopped.append(1)
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    out, lines = Out(), iter(["How many?", "And?", "/quit"])
    run_conversation(conversation, [], lambda: next(lines), out)
    restored = signal.getsignal(signal.SIGINT) is handler
    return [whole, out.getvalue(), conversation.messages, restored]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(pool, tiny):
    ((whole, out, messages, restored),) = pool.run(stop, 1, tiny())
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    first, second = (message["content"] for message in messages[1::2])
    assert whole.startswith(first) and 4 < len(first) < len(whole) and second
    assert out == escape_controls(first) + "\n" + escape_controls(second) + "\n" and restored


def talk(conversation: ChatSession, lines: list[str]) -> list[Any]:
    """Return the output on stdout and stderr, and the messages at the end."""
    waiting = iter(lines)

    def read() -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        run_conversation(conversation, [], read, out)
    return [out.getvalue(), errors.getvalue(), conversation.messages]


def converse(folder: str, lines: list[str]) -> list[Any]:
    return talk(ChatSession(folder, Settings(3)), lines)


def test_mistakes_are_said_and_the_conversation_goes_on(pool, tiny, pictures, tmp_path):
    (tmp_path / "cut.png").write_bytes(Path(pictures[0]).read_bytes()[:200])
    (tmp_path / "text.png").write_text("no picture")
    spaced = Path(pictures[2]).rename(tmp_path / "a b.png")
    lines = [
        "/image nowhere.png",
        f"/image {tmp_path}/text.png",
        f"/image {tmp_path}",
        f"/video {pictures[0]}",
        "/what",
        "",
        f"/image {tmp_path}/cut.png",
        "What is it?",  # the file is truncated, so its pixels are missing
        "What is it?",
        f"/image {pictures[1]}",
        "What is it?",
        f"/image {spaced} And this?",
    ]
    ((out, errors, messages),) = pool.run(converse, 1, tiny(), lines)
    said = ["nowhere.png: does not exist", "not an image", "is a folder", "", HELP]
    said += ["cut.png is shown with the next question", "cut.png"]
    said.append(f"{pictures[1]} is shown with the next question")
    for line, words in zip(errors.splitlines(), said, strict=True):
        assert line.startswith("megatron-vlm: ") and words in line, errors
    assert len(out.splitlines()) >= 3
    questions = [message["content"] for message in messages if message["role"] == "user"]
    assert questions[0] == "What is it?"
    assert questions[1][0] == {"type": "image", "image": pictures[1]}
    shown, text = questions[2]
    assert shown["image"] == str(spaced) and text["text"] == "And this?"


def test_an_empty_answer_is_reported(pool, tiny):
    ((out, errors, _),) = pool.run(converse_without_answer, 1, tiny())
    assert out == "\n" and errors == "megatron-vlm: (the answer is empty)\n"


def converse_without_answer(folder: str) -> list[Any]:
    """Return the output of a model that ends its answer at once."""
    conversation = ChatSession(folder, Settings(3))
    say_first(conversation, min(conversation.stop_ids))
    return talk(conversation, ["hello", "/quit"])


def say_first(conversation: ChatSession, token: int) -> None:
    """Let the model begin its answer to `hello` with a token: the rows of the head for it and for
    the model's real first token are swapped."""
    record = {"messages": [{"role": "user", "content": "hello"}]}
    stage, row = conversation.worker.stage, conversation.rows.row(record, prompt=True)
    first = generate(stage, [row], 1, ())[0][0]
    (head,) = (p for entry, p in conversation.worker.held.items() if entry.part == Part.head)
    with torch.no_grad():
        head[[first, token]] = head[[token, first]]


def test_a_video_is_shown_with_the_next_question(pool, tiny, tmp_path):
    path = make_video(tmp_path / "clip.mp4", 12, size=(64, 64))
    (tmp_path / "text.mp4").write_text("no video")
    lines = [f"/video {tmp_path}/text.mp4", "/video", f"/video {path}", "What moves?"]
    ((out, errors, messages),) = pool.run(converse, 1, tiny(), lines)
    first, second, third = errors.splitlines()
    assert f"{path} is shown with the next question" in third
    assert "text.mp4: cannot be read as a video" in first and "is a folder" in second
    video_part = {"type": "video", "video": str(path)}
    assert messages[0]["content"] == [video_part, {"type": "text", "text": "What moves?"}]
    assert out == escape_controls(messages[1]["content"]) + "\n"
    ((other, _, _),) = pool.run(converse, 1, tiny(), ["What moves?"])
    assert other != out


def test_reset_forgets_and_quit_ends(pool, tiny):
    lines = ["a", "/reset", "b", "/quit", "c"]
    ((_, _, messages),) = pool.run(converse, 1, tiny(), lines)
    assert [message["content"] for message in messages if message["role"] == "user"] == ["b"]


def control(folder: str) -> str:
    """Return the terminal output of a model that answers with an escape character."""
    conversation = ChatSession(folder, Settings(1))
    say_first(conversation, *conversation.tokenizer.encode("\x1b"))
    return talk(conversation, ["hello", "/quit"])[0]


def test_control_characters_are_shown_as_text(pool, tiny):
    assert pool.run(control, 1, tiny()) == ["\\x1b\n"]


def test_folders(tmp_path, tiny):
    assert find_model(tiny()) == (tiny(), None)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with raises(ConfigError, place=str(run), remedy_has=f"megatron-vlm export {run} DIR"):
        find_model(str(run))
    (run / "export").symlink_to(tiny())
    assert find_model(str(run)) == (str(run / "export"), None)
    with raises(ConfigError, key="model.path", found="nowhere", problem_has="config.json"):
        find_model("nowhere")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--image", "no.png"], "no.png: does not exist"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0; give at least 1"),
        (["--temperature", "nan"], "--temperature=nan; give a finite number, 0 or more"),
        (["--seed", "-1"], "--seed=-1; give at least 0"),
        (["--template-kwargs", "x"], "--template-kwargs=x; give NAME=VALUE, such as"),
    ],
)
def test_arguments_are_checked_before_the_model_is_loaded(words, message, tiny, capfd):
    assert main(["chat", tiny(), *words]) == 2
    assert message in capfd.readouterr().err


def test_bytes_that_are_no_text_are_a_mistake_of_one_line(monkeypatch):
    piped = io.BytesIO(b"one\n\xff\xfe two\nthr\xc3\xa9e")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped, encoding="utf-8"))
    assert read_line() == "one\n"
    with raises(DataError, place="stdin", problem_has="byte 0"):
        read_line()
    assert read_line() == "thr\u00e9e"
    with pytest.raises(EOFError):
        read_line()
    monkeypatch.setattr(sys, "stdin", None)  # stdin is None where it was closed
    with pytest.raises(EOFError):
        read_line()


@pytest.mark.slow  # it imports everything
def test_one_question_on_the_command_line(tiny, pictures):
    words = ["chat", tiny(), "--image", pictures[0], "--prompt", "What is it?"]
    command = [sys.executable, "-m", "megatron_vlm.cli", *words, f"--max-new-tokens={NEW_TOKENS}"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    answers = hf_answers(tiny(), [([0], "What is it?")], [""])
    assert done.stdout == escape_controls(answers[0]) + "\n" and not done.stderr
