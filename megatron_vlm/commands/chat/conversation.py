"""A conversation with a checkpoint in the terminal, by the model of training and evaluation in one
process. Each question is encoded with all messages before it, as a record would be. stdout has
nothing but the answers and the input prompt."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from torch import OutOfMemoryError

from megatron_vlm.commands.chat.chat_settings import Settings
from megatron_vlm.config.schema import CheckpointConfig, Config, LoraConfig, ModelConfig
from megatron_vlm.data.media.media import image_size
from megatron_vlm.data.media.video_file import probe_video
from megatron_vlm.data.records.record import Image
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.data.tokens.tokenizer import stop_ids
from megatron_vlm.distributed.process import INTERRUPTED, print_to_user
from megatron_vlm.errors import DataError, MegatronVLMError
from megatron_vlm.family import read_sizes
from megatron_vlm.io.hub import folder_of
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.io.untrusted import home_path, real_path, require_file
from megatron_vlm.lora.peft_folder import lora_of
from megatron_vlm.training.generate import sample
from megatron_vlm.training.worker import MegatronWorker


class AnswerStopped(Exception):  # noqa: N818 - not an error
    """Signal to end an answer, raised by the callback that receives it. The text until then
    stays."""


class ChatSession:
    """A model, and the messages so far."""

    def __init__(self, folder: str, settings: Settings, adapter: Path | None = None):
        longest = read_sizes(folder).text.max_positions
        # Users may open any of their files. Their input is text, even if it spells a special token.
        typed = {"special_tokens": "escape", "lone_marks": "text"}
        variables = settings.template_kwargs
        self.rows = RowMaker(
            folder, image_root="/", max_tokens=longest, template_kwargs=variables, **typed
        )
        renderer = self.rows.reader.encoder.renderer
        self.tokenizer = renderer.tokenizer
        self.stop_ids = stop_ids(folder_of(folder), renderer.end_ids)
        self.settings = settings
        lora = LoraConfig() if adapter is None else lora_of(adapter, folder)
        cfg = Config(
            platform=settings.platform,
            model=ModelConfig(folder),
            lora=lora,
            checkpoint=CheckpointConfig(export=False),
        )
        self.worker = MegatronWorker(cfg, training=False)
        self.messages: list[dict[str, Any]] = []

    def medium(self, kind: str, name: str) -> dict[str, str]:
        """Return the part of a message that shows a picture or a video, which can be opened."""
        path = str(real_path(require_file(home_path(name))))
        if kind == "image":
            image_size(Image(path), self.rows.reader.policy, name)
        else:
            probe_video(Path(path))
        return {"type": kind, kind: path}

    def ask(self, text: str, media: Sequence[dict[str, str]], hear: Callable[[str], None]) -> str:
        """Return the answer; `hear` receives it piece by piece before. A question that cannot be
        encoded raises an error and is forgotten."""
        content = [*media, {"type": "text", "text": text}] if media else text
        messages = [*self.messages, {"role": "user", "content": content}]
        prompt = self.rows.row({"messages": messages}, prompt=True, where="this conversation")
        ids: list[int] = []
        sent = ""

        def take(_: int, token: int) -> None:
            nonlocal sent
            ids.append(token)
            decoded = self._text(ids)
            # A character may take several tokens: until the last one it ends in U+FFFD.
            decoded = sent if decoded.endswith("\ufffd") else decoded
            piece, sent = decoded[len(sent) :], decoded
            hear(piece)

        settings, stop_ids = self.settings, tuple(self.stop_ids)
        sampling = SamplingSettings(
            settings.max_new_tokens, settings.temperature, stop_ids=stop_ids
        )
        seeds = [settings.seed + len(self.messages)]
        with suppress(AnswerStopped):
            sample(self.worker.stage, [prompt], sampling, seeds=seeds, on_token=take)
        answer = self._text(ids)
        with suppress(AnswerStopped):
            hear(answer[len(sent) :])
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def reset(self) -> None:
        """Forget all messages."""
        self.messages = []

    def _text(self, ids: Sequence[int]) -> str:
        return self.rows.reader.encoder.renderer.answer_text(ids)


HELP = (
    "/image PATH or /video PATH shows one with the next question, or with one that follows the "
    "path, /reset forgets what was said, "
    "/quit or Ctrl-D ends; Ctrl-C stops an answer"
)


def run_chat(
    folder: str,
    adapter: Path | None,
    images: Sequence[str],
    videos: Sequence[str],
    prompt: str | None,
    settings: Settings,
) -> int:
    """Answer one question, or all that are typed; return the exit status."""
    conversation = ChatSession(folder, settings, adapter)
    media = [conversation.medium("image", path) for path in images]
    media += [conversation.medium("video", path) for path in videos]
    try:
        if prompt is not None:
            _answer(conversation, prompt, media, sys.stdout)
        else:
            print_to_user(f"{adapter or folder} on {conversation.worker.platform.name}. {HELP}.")
            run_conversation(conversation, media, read_line, sys.stdout)
    except KeyboardInterrupt:  # a second Ctrl-C, or one while a question is encoded
        return INTERRUPTED
    return 0


def run_conversation(
    conversation: ChatSession, media: list[dict[str, str]], read: Callable[[], str], out: TextIO
) -> None:
    """Answer each line that `read` returns, until /quit or EOFError. Errors are printed."""
    while True:
        try:
            line = read().strip()
            if line in ("/quit", "/exit"):
                return
            _take(line, conversation, media, out)
        except EOFError:
            return
        except KeyboardInterrupt:
            print_to_user("/quit or Ctrl-D ends")
        except MegatronVLMError as error:
            print_to_user(str(error))
        except OutOfMemoryError:
            print_to_user(
                "there is not enough memory for this conversation; /reset begins a new one"
            )


def _take(line: str, conversation: ChatSession, media: list[dict[str, str]], out: TextIO) -> None:
    """Execute a line. `media` waits for the next question."""
    command, _, rest = line.partition(" ")
    question = "" if re.fullmatch(r"/\w*", command) else line
    if command == "/reset":
        conversation.reset()
        media.clear()
    elif command in ("/image", "/video"):
        path, question = split_path(rest.strip())
        media.append(conversation.medium(command[1:], path))
        if not question:
            print_to_user(f"{path} is shown with the next question")
    elif line and not question:
        print_to_user(HELP)
    if question:
        shown = list(media)
        media.clear()  # a medium that cannot be decoded is not shown again
        _answer(conversation, question, shown, out)


def split_path(text: str) -> tuple[str, str]:
    """Return the path at the beginning of a text, and the question after it. A path with spaces is
    the longest beginning that exists, or is in quotes."""
    if text[:1] in ("'", '"') and (end := text.find(text[0], 1)) > 0:
        return text[1:end], text[end + 1 :].strip()
    words = text.split(" ")
    for count in range(len(words), 0, -1):
        path = " ".join(words[:count])
        if path and os.path.isfile(home_path(path)):
            return path, " ".join(words[count:]).strip()
    return text, ""  # conversation.py explains what is wrong with it


def _answer(
    conversation: ChatSession, text: str, media: Sequence[dict[str, str]], out: TextIO
) -> None:
    with _interrupts() as received:

        def hear(piece: str) -> None:
            out.write(escape_controls(piece))
            out.flush()
            if received:
                received.clear()  # the rest is only flushed
                raise AnswerStopped

        try:
            if not conversation.ask(text, media, hear).strip():
                print_to_user("(the answer is empty)")
        finally:
            out.write("\n")
            out.flush()


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Append Ctrl-C to the list, so that an answer ends between two tokens. A second Ctrl-C before
    that ends the program."""
    received: list[int] = []

    def handle(number: int, _: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def read_line() -> str:
    """Read a line of stdin; at a terminal, people can edit it. Raise DataError if the line is not
    text; the next call reads the line after it."""
    if sys.stdin is None:  # it was closed before the program started
        raise EOFError
    try:
        if not sys.stdin.isatty():
            # Each line of bytes is decoded by itself, because a text reader would lose its
            # position.
            line = sys.stdin.buffer.readline()
            if not line:
                raise EOFError
            return line.decode(sys.stdin.encoding)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() uses it
        return input("> ")
    except UnicodeDecodeError as error:
        raise DataError(
            f"this line is not {error.encoding} text, at byte {error.start}",
            place="stdin",
            remedy="type it again",
        ) from None
