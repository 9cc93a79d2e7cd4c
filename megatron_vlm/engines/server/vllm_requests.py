"""Requests of vLLM: their parameters and prompts, their contents after vLLM's processor, samples in
progress, and the answers that go back to the trainer."""

import json
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from vllm_fixes import count_given_sizes
from weight_pieces import Message

_PASSED = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")


def sampling_params(
    settings: Message, never: Message, seed: int, special: list[str], streamed: bool
) -> Any:
    """Return vLLM's parameters. Only the settings end an answer. Log-probs are the model's own,
    which is vLLM's default, `raw_logprobs`. Stop strings are searched in the text without `special`
    tokens, as this package's own sampler does, unless a stop string contains such a token. `never`:
    see `forbid`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured = None
    if settings["grammar"] is not None:
        kind, content = settings["grammar"]
        value = json.loads(content) if kind == "choice" else content
        structured = StructuredOutputsParams(**{kind: value})
    stops = settings["stop_strings"]
    shown = any(token in stop for stop in stops for token in special)
    return SamplingParams(
        max_tokens=settings["max_tokens"],
        temperature=settings["temperature"],
        top_k=settings["top_k"],
        top_p=settings["top_p"],
        seed=seed,
        stop=stops or None,
        stop_token_ids=settings["stop_ids"],
        ignore_eos=True,
        logprobs=0,
        detokenize=bool(stops),
        skip_special_tokens=not shown,
        structured_outputs=structured,
        logit_bias=dict(settings["logit_bias"]) | never.get("logit_bias", {}) or None,
        bad_words=never.get("bad_words"),
        **{name: settings[name] for name in _PASSED},
        output_kind=RequestOutputKind.CUMULATIVE if streamed else RequestOutputKind.FINAL_ONLY,
    )


def forbid(ids: list[int], engine: Any) -> Message:
    """Return the parameters by which ids are never sampled. Beside drafts vLLM takes no
    logit_bias."""
    if engine.vllm_config.speculative_config is None:
        return {"logit_bias": dict.fromkeys(ids, float("-inf"))}
    return {"bad_words": engine.get_tokenizer().convert_ids_to_tokens(ids)}


def is_mistake(error: Exception) -> bool:
    """Return whether vLLM takes an error for its client's."""
    from vllm.exceptions import VLLMClientError

    return isinstance(error, VLLMClientError)


def answer_of(output: Any) -> Message:
    """Return the ids and log-probs of a sample, the reason why it ended, the versions of the
    weights that sampled it with their numbers of tokens, and its rounds by accepted drafts."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    log_probs = [
        candidates[token].logprob
        for token, candidates in zip(ids, completion.logprobs, strict=True)
    ]
    versions = [[int(each.version), each.end - each.start] for each in completion.weight_versions]
    return {
        "ids": ids,
        "log_probs": log_probs,
        "ended": completion.finish_reason,
        "versions": versions,
        "accepted": [] if (drafts := completion.spec_decode_metrics) is None else drafts.histogram,
    }


def scoring_params(top_k: int) -> Any:
    """Return vLLM's parameters of a request that only scores its prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,  # vLLM draws one token at least
        prompt_logprobs=top_k,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def table_of(ids: list[int], log_probs: list[Any], top_k: int) -> bytes:
    """Return the scores of a prompt. Nothing predicts its first token, whose scores are 0."""
    values = array("d")
    for token, candidates in zip(ids, log_probs, strict=True):
        if candidates is None:
            values.extend([0.0] * 2 * (1 + top_k))
            continue
        ranked = sorted(candidates.items(), key=lambda item: item[1].rank)[:top_k]
        for other, scored in [(token, candidates[token]), *ranked]:
            values.extend((other, scored.logprob))
    return values.tobytes()


def to_vllm_prompt(
    prompt: list[int],
    pictures: list[list[int]],
    videos: list[Message],
    processor: Message,
    body: bytes,
) -> Any:
    """Return vLLM's form of a prompt, which has one placeholder for each picture and each video.
    `pictures` are heights and widths. The body has the RGB pixels, already in the trainer's sizes,
    in which the options of `processor` leave them."""
    import numpy as np
    import PIL.Image

    inputs: Message = {"prompt_token_ids": prompt}
    media: dict[str, list[Any]] = {}
    start = 0
    for high, wide in pictures:
        end = start + 3 * high * wide
        picture = PIL.Image.frombytes("RGB", (wide, high), body[start:end])
        media.setdefault("image", []).append(picture)
        start = end
    for video in videos:
        frames, high, wide = video["shape"]
        end = start + 3 * frames * high * wide
        frames_RGB = np.frombuffer(body[start:end], np.uint8).reshape(frames, high, wide, 3)
        media.setdefault("video", []).append((frames_RGB, video["facts"]))
        start = end
    if media:
        count_given_sizes()
        inputs["multi_modal_data"] = media
        inputs["mm_processor_kwargs"] = processor
    return inputs


def inspect_request(request: Any, model: Any, names: Message) -> tuple[Message, bytes]:
    """Return the ids of vLLM's own request, and the grids, types and shapes of its patches. The
    values follow as fp32: first all pictures, then all videos. `names` names the tower and its
    inputs."""
    import torch

    about: Message = {"ids": list(request.prompt_token_ids), "image": [], "video": []}
    values: dict[str, list[bytes]] = {"image": [], "video": []}
    tower = getattr(model, names["tower"])
    for feature in request.mm_features or []:
        kind, data = feature.modality, feature.data.get_data()
        patches_name, grid_name = names[kind]
        patches = normalise_patches(data[patches_name], tower)
        about[kind].append(
            {
                "grid": data[grid_name].flatten().tolist(),
                "dtype": str(patches.dtype).removeprefix("torch."),
                "shape": list(patches.shape),
            }
        )
        values[kind].append(patches.to("cpu", torch.float32).contiguous().numpy().tobytes())
    return about, b"".join([*values["image"], *values["video"]])


def normalise_patches(patches: Any, tower: Any) -> Any:
    """Return patches as the tower's first layer receives them. vLLM may pass bytes to the tower,
    which normalises them itself (0.32 does)."""
    norm = getattr(tower, "input_norm", None)
    patches = patches.to(tower.device)
    return patches.to(tower.dtype) if norm is None else norm(patches, tower.dtype)


TELL_S = 0.05  # seconds between two messages about the tokens of a streamed request


@dataclass
class PendingRequest:
    """A prompt whose samples are in progress."""

    expected: list[int]  # ids of the prompt, with all placeholders
    samples: list[Message | None]
    names: list[str] = field(default_factory=list)  # names of vLLM's requests
    top_k: int | None = None  # set if the prompt itself is scored
    routing_start: int | None = None  # first token whose experts are returned; None: there is none
    tables: dict[int, bytes] = field(default_factory=dict)  # experts by sample
    drawn: dict[int, list[int]] = field(default_factory=dict)  # tokens by sample, if streamed
    told: dict[int, int] = field(default_factory=dict)  # number of tokens that were told
    told_at: float = float("-inf")

    def news(self, place: int, ids: list[int]) -> list[list[object]] | None:
        """Record the tokens of a sample. If it is time to tell, return for each sample the number
        of its tokens that were told before, and those that follow."""
        self.drawn[place] = ids
        if (now := time.monotonic()) < self.told_at + TELL_S:
            return None
        self.told_at, news = now, list[list[object]]()
        for number in range(len(self.samples)):
            drawn, told = self.drawn.get(number, []), self.told.get(number, 0)
            news.append([told, drawn[told:]])
            self.told[number] = len(drawn)
        return news
