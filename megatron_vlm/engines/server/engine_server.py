"""vLLM behind a socket: `python engine_server.py SOCKET BUFFER`, with two file descriptors that it
inherits.

The file runs by its path in the engine's own environment, which does not have this package. The
frames are defined in frames.py. A request is {"id": N, "do": METHOD, ...}; its answer is {"id": N,
"answer": ...} or {"id": N, "error": TEXT}. Requests join the running batch, and each is answered
when it ends. Weights arrive through BUFFER, memory that both processes share. The end of the socket
ends the process.
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
from cpu_fixes import fix_vllm_on_cpu
from frames import Message
from request_params import answer_of, sampling_params, scoring_params, table_of
from vllm_prompt import inspect_request, to_vllm_prompt

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # keeps the model in this process, so that weights can be streamed to it
)


@dataclass
class PendingRequest:
    """A prompt whose samples are in progress."""

    expected: list[int]  # ids of the prompt, with all placeholders
    samples: list[Message | None]
    names: list[str] = field(default_factory=list)  # names of vLLM's requests
    top_k: int | None = None  # set if the prompt itself is scored


class Server:
    """A vLLM engine and its pending requests."""

    def __init__(self, link: ParentChannel):
        self.link = link
        self.engine: Any = None
        self.special: list[str] = []  # tokens that are not text
        self.adapter: Any = None  # adapter of requests that name no adapter
        self.nothing: str | None = None  # adapter without effect that these need on the CPU
        self.adapters = NamedAdapters()
        self.version = 0
        self.pending: dict[int, PendingRequest] = {}

    def run(self) -> None:
        """Answer requests forever. An error in vLLM's own step ends the process, because the state
        of the engine is unknown after it."""
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
            elif do == "score":
                self.score(number, body=body, **message)
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
        """Load a checkpoint's folder, and return the version of vLLM. `options` are additional
        EngineArgs."""
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if current_platform.is_cpu():
            fix_vllm_on_cpu()
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
        """Sample a token. Some settings that vLLM's kernels do not support fail only at the first
        token."""
        from vllm import SamplingParams

        # vLLM 0.32 on the CPU refuses a prompt of one token to a model with gated delta nets.
        self.engine.add_request("first", {"prompt_token_ids": [0, 0]}, SamplingParams(max_tokens=1))
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
        """Sample an answer for each seed. `prompt` (see vllm_prompt.py) must expand to `expected`.
        The ids of `never` are not sampled. `adapter` is the folder of an adapter that this request
        uses instead of the one of `adapt`."""
        request = self.pending[number] = PendingRequest(expected, [None] * len(seeds))
        try:
            inputs = to_vllm_prompt(**prompt)
            adapter_folder = adapter or (self.nothing if self.adapter is None else None)
            lora = (
                self.adapter
                if adapter_folder is None
                else self.adapters.request_for(self.engine, adapter_folder)
            )
            for place, seed in enumerate(seeds):
                params = sampling_params(settings, never, seed, self.special)
                name = f"{number}-{place}"
                self.engine.add_request(name, inputs, params, lora_request=lora)
                request.names.append(name)
        except Exception:
            self._forget_request(number)
            raise

    def score(self, number: int, expected: list[int], top_k: int, **prompt: Any) -> None:
        """Score the tokens of a prompt. The answer is a table of float64 with the id and the
        log-prob of each token, and then those of the `top_k` most likely tokens in its place."""
        self.pending[number] = request = PendingRequest(expected, [None], top_k=top_k)
        try:
            name = f"{number}-0"
            self.engine.add_request(name, to_vllm_prompt(**prompt), scoring_params(top_k))
            request.names.append(name)
        except Exception:
            self._forget_request(number)
            raise

    def inspect(self, **prompt: Any) -> tuple[Message, bytes]:
        """Return a prompt as vLLM's processor prepares it, without sampling."""
        import vllm
        from vllm import SamplingParams

        config = self.engine.vllm_config.model_config.multimodal_config
        if config.mm_processor_cache_gb > 0:  # the cache would hold media that no request has sent
            raise ValueError("to look at prompts, start the engine with mm_processor_cache_gb=0")
        if self.engine.vllm_config.parallel_config.world_size > 1:
            raise ValueError("to look at prompts, start an engine of one process")
        request = self.engine.input_processor.process_inputs(
            "inspected",
            to_vllm_prompt(**prompt),
            SamplingParams(max_tokens=1),
            supported_tasks=self.engine.get_supported_tasks(),
        )
        [(about, values)] = self.engine.apply_model(lambda model: inspect_request(request, model))
        return {**about, "vllm": str(vllm.__version__)}, values

    def _take(self, output: Any) -> None:
        """Store a sample that has ended, and answer its request once all samples have ended."""
        number, place = map(int, output.request_id.split("-"))
        request = self.pending[number]
        if output.prompt_token_ids != request.expected:
            self._forget_request(number)
            self.link.refuse(number, _unlike_ids_message(output.prompt_token_ids, request.expected))
            return
        if request.top_k is not None:
            del self.pending[number]
            scores = table_of(output.prompt_token_ids, output.prompt_logprobs, request.top_k)
            self.link.answer(number, {"version": self.version}, scores)
            return
        request.samples[place] = answer_of(output)
        if None not in request.samples:
            del self.pending[number]
            self.link.answer(number, {"samples": request.samples, "version": self.version})

    def _forget_request(self, number: int) -> None:
        if (request := self.pending.pop(number, None)) is not None:
            self.engine.abort_request(request.names)

    def folder(self, folder: str, version: int) -> None:
        """Load the weights of a checkpoint's folder."""
        self._reload({"weights_path": folder}, version)

    def stream_weights(self, version: int) -> None:
        """Load the weights that arrive next, tensor by tensor."""
        if self.engine.vllm_config.parallel_config.world_size > 1:
            raise ValueError(
                "tensors are streamed to an engine of one process, and this one has more; update "
                "it from the folder of an export"
            )
        self._reload({"weights_iterator": self._arriving_tensors()}, version)

    def adapt(self, folder: str, version: int) -> None:
        """Load an adapter's folder for all later requests."""
        former, self.adapter = self.adapter, self.adapters.new(self.engine, folder)
        if former is not None:
            self.engine.remove_lora(former.lora_int_id)
        self._renew(version)

    def _reload(self, how: dict[str, Any], version: int) -> None:
        served = self.engine.model_config
        initial_folder = served.model
        try:
            self.engine.collective_rpc("reload_weights", kwargs=how)
        finally:
            served.model = initial_folder  # its tokenizer and processor stay in use
        self.adapter = None
        self.adapters.forget()
        self._renew(version)

    def _renew(self, version: int) -> None:
        """Drop keys, values and features of pictures, which came from former weights."""
        assert not self.pending, "an update comes when nothing is asked"
        assert self.engine.reset_prefix_cache(), "keys and values of former weights are still used"
        self.engine.reset_encoder_cache()
        self.version = version

    def _arriving_tensors(self) -> Iterator[tuple[str, Any]]:
        import torch

        while (tensor := self.link.next_tensor()) is not None:
            about, values = tensor
            dtype = getattr(torch, about["dtype"])
            yield about["name"], torch.frombuffer(values, dtype=dtype).view(about["shape"])


def _unlike_ids_message(ids: list[int], expected: list[int]) -> str:
    return f"PromptError: vLLM made {len(ids)} ids of the prompt, not its {len(expected)}"


if __name__ == "__main__":
    Server(ParentChannel(int(sys.argv[1]), int(sys.argv[2]))).run()
