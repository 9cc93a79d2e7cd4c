"""A conversation with a checkpoint, by the model of training and evaluation in one process. Each
question is encoded with all messages before it, as a record would be."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_vlm.commands.chat.chat_settings import Settings
from megatron_vlm.config.schema import CheckpointConfig, Config, LoraConfig, ModelConfig
from megatron_vlm.data.media.media import image_size
from megatron_vlm.data.media.video_file import probe_video
from megatron_vlm.data.records.record import Image
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.data.tokens.row_maker import RowMaker
from megatron_vlm.data.tokens.tokenizer import stop_ids
from megatron_vlm.family import read_sizes
from megatron_vlm.io.hub import folder_of
from megatron_vlm.io.untrusted import home_path, real_path, require_file
from megatron_vlm.lora.peft_config import lora_of
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
