"""vLLM behind a socket: `python engine_server.py SOCKET BUFFER`, with two file descriptors that it
inherits.

The file runs by its path in the engine's own environment, which does not have this package. The
messages are defined in io/parent.py. Requests join the running batch, and each is answered when it
ends. The news of a streamed request are its tokens. Weights arrive through BUFFER, memory that both
processes share. The process ends with the sampler's process, also if that is killed.
"""

import atexit
import os
import queue
import shutil
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from adapter_folders import NamedAdapters, rank_for, write_nothing
from expert_capture import ExpertCapture, capture_arguments
from vllm_requests import (
    PendingRequest,
    answer_of,
    forbid,
    inspect_request,
    is_mistake,
    sampling_params,
    scoring_params,
    table_of,
    to_vllm_prompt,
)

sys.path.append(str(Path(__file__).parents[2] / "io"))
from parent import Frame, Message, ParentChannel

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# The scheduler stays in this process, and a model that has one worker. More workers are processes
# that import shared_weights.py, and do not inherit the socket.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


class Server:
    """A vLLM engine and its pending requests."""

    def __init__(self, link: ParentChannel, buffer_file: int):
        self.link, self.buffer_file = link, buffer_file
        self.inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        link.listen(self.inbox.put)
        self.engine: Any = None
        self.special: list[str] = []  # tokens that are not text
        self.adapter: Any = None  # adapter of requests that name no adapter
        self.nothing: str | None = None  # adapter without effect that these need on the CPU
        self.adapters = NamedAdapters()
        self.capture: ExpertCapture | None = None
        self.pending: dict[int, PendingRequest] = {}
        self.is_paused = False  # while the pieces of new weights arrive

    def run(self) -> None:
        """Answer requests forever. An error in vLLM's own step ends the process, because the state
        of the engine is unknown after it."""
        while True:
            while not self._has_work() or not self.inbox.empty():
                self._handle(*self.inbox.get())
            for output in self.engine.step():
                self._handle_output(output)

    def _has_work(self) -> bool:
        """Return whether there are tokens to draw, and weights to draw them with."""
        if self.engine is None or self.is_paused:
            return False
        return bool(self.engine.has_unfinished_requests())

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
        media: dict[str, int],
        lora_rank: int,
        lora_vision: bool,
        adapters: int,
        routing_layers: list[int],
        version: int,
        options: dict[str, Any],
    ) -> list[str]:
        """Load a checkpoint's folder, and return the names of its GPUs. `media` are the most images
        and videos of a prompt, and `options` are additional EngineArgs."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

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
            limit_mm_per_prompt=media,
            enforce_eager=current_platform.is_cpu(),
            disable_log_stats=True,
            worker_extension_cls="shared_weights.WorkerExtension",
            weight_transfer_config={"backend": "shared"},
            **(lora if lora_rank else {}),
            **(capture_arguments(current_platform.is_cpu()) if routing_layers else {}),
        )
        arguments |= options
        if current_platform.is_cpu() and arguments.get("speculative_config"):
            # The cache of a gated delta net's states copies them by a Triton kernel.
            arguments.setdefault("enable_prefix_caching", False)
        if current_platform.is_cpu() and arguments.get("enable_lora"):
            self.nothing = write_nothing(folder, tempfile.mkdtemp(prefix="megatron-vlm-nothing-"))
            atexit.register(shutil.rmtree, self.nothing, ignore_errors=True)
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        end_with_workers(getattr(self.engine.model_executor, "workers", []))
        if routing_layers:
            self.capture = ExpertCapture.begin(self.engine, routing_layers)
        self._try()
        self.special = list(self.engine.get_tokenizer().all_special_tokens)
        self.engine.set_weight_version(str(version))
        return [gpu for gpu in self.engine.collective_rpc("name_of_gpu") if gpu is not None]

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
        routing_start: int | None = None,
        streamed: bool = False,
        **prompt: Any,
    ) -> None:
        """Sample an answer for each seed. `prompt` (see vllm_requests.py) must expand to
        `expected`. The ids of `never` are not sampled. `adapter` is the folder of an adapter that
        this request uses instead of the one of `adapt`. The experts of the tokens from
        `routing_start` on are returned as well. A streamed request receives its tokens while they
        are drawn."""
        request = self.pending[number] = PendingRequest(
            expected, [None] * len(seeds), routing_start=routing_start
        )
        try:
            inputs = to_vllm_prompt(**prompt)
            adapter_folder = adapter or (self.nothing if self.adapter is None else None)
            lora = (
                self.adapter
                if adapter_folder is None
                else self.adapters.request_for(self.engine, adapter_folder)
            )
            forbidden = forbid(never, self.engine)
            for place, seed in enumerate(seeds):
                params = sampling_params(settings, forbidden, seed, self.special, streamed)
                params.routed_experts_prompt_start = routing_start or 0
                name = f"{number}-{place}"
                self.engine.add_request(name, inputs, params, lora_request=lora)
                request.names.append(name)
        except Exception as error:
            self._forget_request(number)
            is_asked = settings["grammar"] or settings["min_p"] or settings["logit_bias"]
            if not is_asked or not is_mistake(error):
                raise
            self.link.refuse(number, f"PromptError: {str(error).splitlines()[0]}")

    def score(self, number: int, expected: list[int], top_k: int, **prompt: Any) -> None:
        """Score the tokens of a prompt. The answer is a table of float64: the id and the log-prob
        of each token, then of the `top_k` most likely tokens in its place."""
        self.pending[number] = request = PendingRequest(expected, [None], top_k=top_k)
        try:
            name = f"{number}-0"
            self.engine.add_request(name, to_vllm_prompt(**prompt), scoring_params(top_k))
            request.names.append(name)
        except Exception:
            self._forget_request(number)
            raise

    def inspect(self, names: Message, **prompt: Any) -> tuple[Message, bytes]:
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
        [(about, values)] = self.engine.apply_model(lambda m: inspect_request(request, m, names))
        return {**about, "vllm": str(vllm.__version__)}, values

    def _handle_output(self, output: Any) -> None:
        """Stream a sample's new tokens, or store an ended sample, and answer the request after its
        last one."""
        number, place = map(int, output.request_id.split("-"))
        if (request := self.pending.get(number)) is None:
            return  # another of its samples was refused in this step
        if output.prompt_token_ids != request.expected:
            self._forget_request(number)
            made, expected = len(output.prompt_token_ids), len(request.expected)
            text = f"PromptError: vLLM made {made} ids of the prompt, not its {expected}"
            self.link.refuse(number, text)
            return
        if request.top_k is not None:
            del self.pending[number]
            scores = table_of(output.prompt_token_ids, output.prompt_logprobs, request.top_k)
            self.link.answer(number, {}, scores)
            return
        if not output.finished:  # only of streamed requests
            news = request.news(place, output.outputs[0].token_ids)
            if news is not None:
                self.link.tell(number, news)
            return
        request.samples[place] = sample = answer_of(output)
        if self.capture is not None and request.routing_start is not None:
            table = self.capture.take(output, request.routing_start)
            sample["routing"], request.tables[place] = table.shape, table.tobytes()
        if None not in request.samples:
            del self.pending[number]
            tables = b"".join(request.tables[place] for place in sorted(request.tables))
            self.link.answer(number, {"samples": request.samples}, tables)

    def _forget_request(self, number: int) -> None:
        if (request := self.pending.pop(number, None)) is not None:
            self.engine.abort_request(request.names)

    def folder(self, folder: str, version: int) -> None:
        """Load the weights of a checkpoint's folder."""
        served = self.engine.model_config
        initial_folder = served.model
        try:
            self.engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        finally:
            served.model = initial_folder  # its tokenizer and processor stay in use
        self._forget_adapters()
        self._renew(version)

    def start_weights(self, handle: str | None = None, size: int = 0) -> None:
        """Prepare all workers for new weights, which arrive in pieces: in memory of `size` bytes on
        their GPU that has this handle, or else in memory of the host."""
        self.is_paused = True
        path = f"/proc/{os.getpid()}/fd/{self.buffer_file}"
        memory = {"path": path, "handle": handle, "size": size}
        self.engine.collective_rpc("init_weight_transfer_engine", args=(memory,))
        self.engine.collective_rpc("start_weight_update")

    def piece(self, parts: list[Message]) -> None:
        """Let all workers copy what the memory holds, which may then be filled again."""
        self.engine.collective_rpc("update_weights", args=({"parts": parts},))

    def finish_weights(self, version: int) -> None:
        """Use the weights that have arrived."""
        self.engine.collective_rpc("finish_weight_update")
        if self.engine.vllm_config.speculative_config is not None:
            self.engine.collective_rpc("start_draft_weight_update")
            self.engine.collective_rpc("update_weights", args=({"parts": []},))
            self.engine.collective_rpc("finish_weight_update")
        self._forget_adapters()
        self._renew(version)
        self.is_paused = False

    def adapt(self, folder: str, version: int) -> None:
        """Load an adapter's folder for all requests that name none, also for those in progress."""
        if self.adapter is None:
            self.adapter = self.adapters.new(self.engine, folder)
        else:
            self.adapters.replace(self.engine, self.adapter, folder)
        self._renew(version)

    def _forget_adapters(self) -> None:
        """Forget all adapters, which vLLM drops with the weights below them."""
        self.adapter = None
        self.adapters.forget()

    def _renew(self, version: int) -> None:
        """Drop keys, values and features of pictures, which came from former weights. Requests in
        progress keep their tokens, and everything else is computed again."""
        self.engine.reset_prefix_cache(reset_running_requests=True)
        self.engine.reset_encoder_cache()
        self.engine.set_weight_version(str(version))


def end_with_workers(workers: list[Any]) -> None:
    """End this process as soon as one of its own processes has died, and say which one. They are
    vLLM's handles of its workers."""

    def watch() -> None:
        ended = wait([each.proc.sentinel for each in workers])
        for each in workers:
            if each.proc.sentinel in ended:
                print(f"{each.proc.name} (process {each.proc.pid}) has ended, so this engine ends")
        sys.stdout.flush()
        os._exit(1)

    if workers:
        threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    Server(ParentChannel(int(sys.argv[1])), int(sys.argv[2])).run()
