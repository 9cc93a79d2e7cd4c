"""Chats as prompts of samples, and answers as texts, with a checkpoint's tokenizer and template."""

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_vlm.config.schema import Config, DataConfig
from megatron_vlm.data.media.media import image_size, read_image
from megatron_vlm.data.records.record import Conversation, Image
from megatron_vlm.data.tokens.completions import GrowingText
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.data.tokens.sample import Sample
from megatron_vlm.data.tokens.tokenizer import has_byte_level, stop_ids
from megatron_vlm.family import read_family
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.hub import folder_of
from megatron_vlm.serve.http.chat_samples import ChatPrompt, DrawnAnswers
from megatron_vlm.serve.protocol.chat_messages import read_answer
from megatron_vlm.serve.protocol.payloads import RequestError
from megatron_vlm.serve.protocol.requests import HEADS
from megatron_vlm.serve.sample_calls import StopWords

_WHERE = "messages"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte, where others are text


class TokenizerTexts:
    """The ChatTexts of a checkpoint. One thread at a time makes prompts; others may decode."""

    def __init__(self, cfg: Config, sizes: ModelSizes, max_pixels: int):
        """`max_pixels`: maximum pixels in the pictures of a request."""
        # Texts of clients are plain text, also where they spell a special token. The service takes
        # pictures as they are sent.
        data = DataConfig(
            special_tokens="escape",
            lone_marks="text",
            exif_orientation=False,
            max_tokens=sizes.text.max_positions,
            add_tokens=cfg.data.add_tokens,
            template_kwargs=cfg.data.template_kwargs,
        )
        folder = folder_of(cfg.model.path)
        encoder = make_encoder(cfg.model.path, data)
        encoder.images = read_family(folder).images(folder, vars(cfg.data))
        self.reader = make_reader(encoder, data, sizes, root=None)
        self.renderer = self.reader.encoder.renderer
        self.tokenizer, self.max_pixels = self.renderer.tokenizer, max_pixels
        self.chat_format = self.renderer.chat_format
        special = {str(token): id for id, token in self.tokenizer.added_tokens_decoder.items()}
        self.stops = StopWords(stop_ids(folder, self.renderer.end_ids), special.get)
        self.ends = tuple(map(str, self.tokenizer.convert_ids_to_tokens(list(self.stops.ends))))
        self.has_switch = self.renderer.template.has_switch
        self.byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self.has_byte_level = has_byte_level(self.tokenizer)
        self.bytes_of = cache(self._bytes_of)  # a request may ask for millions

    def convert_pictures(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Convert the pictures of read messages, in place, to PNG if samples do not take them."""
        contents = [each["content"] for each in messages if isinstance(each["content"], list)]
        parts = [part for content in contents for part in content if part["type"] == "image"]
        foreign = [
            (part, Image(part["image"]), f"{_WHERE}: image {number}")
            for number, part in enumerate(parts)
            if not part["image"].startswith(tuple(HEADS.values()))
        ]
        sizes = [image_size(picture, self.reader.policy, where) for _, picture, where in foreign]
        if (pixels := sum(map(math.prod, sizes))) > self.max_pixels:
            raise RequestError(
                f": its pictures have {pixels} pixels, and limit pixels is {self.max_pixels}",
                key=_WHERE,
                remedy="send fewer or smaller ones in a request",
            )
        for part, picture, where in foreign:
            file = io.BytesIO()
            read_image(picture, self.reader.policy, where).save(file, "PNG", compress_level=1)
            part["image"] = file.getvalue()

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        drawn: DrawnAnswers = (),
    ) -> ChatPrompt:
        """Render messages, up to the beginning of the answer, or to the end of one that is the last
        message. Messages that are `drawn` answers have the tokens of these."""
        if not self.renderer.template.shows_reasoning:
            # Clients send the thoughts of earlier answers back.
            messages = [
                {name: value for name, value in each.items() if name != "reasoning_content"}
                for each in messages
            ]
        # Models draw empty answers, and clients send them back.
        messages = [{**each, "weight": 0} for each in messages]
        raw = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
        chat = self.reader.parse(raw, _WHERE)
        assert isinstance(chat, Conversation)
        last = chat.turns[-1]
        chat = replace(chat, is_continued=last.role == "assistant")
        sample = self.reader.encode_chat(chat, prompt=True)
        opening = self.renderer.for_chat(chat).template.opening_after(last.role)
        if chat.is_continued:
            opening = "".join(part for part in last.parts if isinstance(part, str))
        ids = self._with_drawn(sample.ids_S.tolist(), drawn, chat.tools)
        sample = replace(sample, ids_S=np.array(ids))
        return ChatPrompt(
            self._chunks(sample, chat.media(Image)),
            ids,
            is_thinking=self.chat_format.thoughts.is_open(opening),
        )

    def _with_drawn(self, ids: list[int], drawn: DrawnAnswers, tools: Sequence[Any]) -> list[int]:
        """Return the tokens of a prompt, with answers as they were drawn: each where the prompt
        before it is the same, and its message has the parts that a client got."""
        start, ends = self.renderer.start_id, self.renderer.end_ids
        for prompt, answer in drawn:
            # What opens an answer may share a token with the text after it.
            head = len(prompt) - prompt[::-1].index(start) if start in prompt else len(prompt)
            if ids[:head] != prompt[:head]:
                continue
            end = next((at for at in range(head, len(ids)) if ids[at] in ends), len(ids))
            opening = self.text(prompt[head:])

            def parts(body: Sequence[int], opening: str = opening) -> tuple[Any, ...]:
                text, is_open = self.text(body), self.chat_format.thoughts.is_open(opening)
                said = read_answer(self.chat_format, text.removeprefix(opening), is_open, tools)
                calls = [(call.name, call.arguments) for call in said.calls]
                return text.startswith(opening), said.content, said.thoughts, calls

            if parts(ids[head:end]) == parts([*prompt[head:], *answer]):
                # The last message may be an answer, which is then to be continued.
                drew = [each for each in answer if end < len(ids) or each not in ends]
                ids = [*prompt, *drew, *ids[end + (drew[-1:] == ids[end : end + 1]) :]]
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.renderer.answer_text(ids)

    def growing(self) -> Callable[[Sequence[int]], str]:
        """Return a function that gives the text of the tokens of an answer, of which there are more
        each time."""
        return GrowingText(self.text).advance

    def call_rules(self, tools: Sequence[Mapping[str, Any]], is_single: bool) -> str:
        """Return rules in Lark for calls of these tools."""
        if self.chat_format.calls.rules is None:
            raise RequestError(
                ": no grammar has exactly the calls of this model's chat template",
                key="tool_choice",
                remedy="give auto without a response_format, or none",
            )
        more = "" if is_single else ' ("\\n" call)*'
        template = str(self.tokenizer.chat_template)
        return f"calls: call{more}\n" + self.chat_format.calls.rules(tools, template, self._symbol)

    def thoughts_rule(self) -> str:
        """Return the rule in Lark for the thoughts of an answer whose prompt has opened them."""
        return rf"thoughts: /(.|\n)*/ {self._symbol(self.chat_format.thoughts.end)} /\n*/"

    def _symbol(self, mark: str) -> str:
        """Return the symbol in Lark for a mark that is a token."""
        return f"<[{self.tokenizer.convert_tokens_to_ids(mark)}]>"

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character. A vocabulary that is
        padded has tokens without any."""
        text = self.tokenizer.convert_ids_to_tokens(token)
        if text is None:
            return b""
        if token in self.tokenizer.added_tokens_decoder:
            return str(text).encode()
        if not self.has_byte_level:
            byte = _BYTE.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
        if self.byte_of.keys() >= set(text):
            return bytes(self.byte_of[character] for character in text)
        return str(text).encode()

    def _chunks(self, sample: Sample, pictures: Sequence[Image]) -> list[dict[str, Any]]:
        """Return the tokens and the pictures as the chunks of a sampling request."""
        ids, at = sample.ids_S.tolist(), 0
        chunks = []
        for picture, grid in zip(pictures, sample.image_grids, strict=True):
            start = ids.index(self.renderer.image_id, at)
            count = self.reader.encoder.images.num_tokens(grid)
            chunks.append({"type": "encoded_text", "tokens": ids[at:start]})
            assert isinstance(picture.source, bytes)
            kind = next(kind for kind, head in HEADS.items() if picture.source.startswith(head))
            data = base64.b64encode(picture.source).decode()
            chunks.append({"type": "image", "data": data, "format": kind, "expected_tokens": count})
            at = start + count
        return [*chunks, {"type": "encoded_text", "tokens": ids[at:]}]
