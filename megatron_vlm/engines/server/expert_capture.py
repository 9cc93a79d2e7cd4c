"""Experts that vLLM chooses for the tokens of its samples.

With Triton, vLLM has an option that returns them with each answer, also for cached prefixes.
Without it, on the CPU, that option is missing, but the routers can report each choice: requests
then run one by one, so that a report belongs to the request in progress.

Shapes: T tokens of a pass, R tokens of a request whose experts are returned, L layers with experts,
K experts of a token.
"""

from collections import defaultdict
from functools import partial
from typing import Any


def capture_arguments(is_cpu: bool) -> dict[str, Any]:
    """Return the EngineArgs that a capture needs."""
    if is_cpu:
        return dict(max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False)
    return dict(enable_return_routed_experts=True, enable_prefix_caching=True)


class ExpertCapture:
    """Capture of the experts of an engine. `layers` are numbers of hidden layers."""

    def __init__(self, layers: list[int]):
        self.layers = layers
        self.reports: dict[int, list[Any]] = defaultdict(list)  # [T, K] by layer, of all passes

    @staticmethod
    def begin(engine: Any, layers: list[int]) -> "ExpertCapture":
        """Return the capture of an engine that was started with `capture_arguments`."""
        capture = ExpertCapture(layers)
        if not engine.vllm_config.aux_output_config.enabled:
            if engine.vllm_config.parallel_config.world_size > 1:
                raise ValueError("without Triton, experts are returned by an engine of one process")
            engine.apply_model(capture.listen)
        return capture

    def listen(self, model: Any) -> None:
        """Let the routers report their choices."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._report, module.layer_id))

    def _report(self, layer: int, chosen_TK: Any) -> None:
        self.reports[layer].append(chosen_TK.short())

    def take(self, output: Any, start: int) -> Any:
        """Return the experts of a finished request's tokens from `start` on [R, L, K]. The last
        token was drawn and never read."""
        import numpy as np

        answer = output.outputs[0]
        if not self.reports:
            return answer.routed_experts[:, self.layers].astype(np.int16)
        import torch

        end = len(output.prompt_token_ids) + len(answer.token_ids) - 1
        by_layer = [torch.cat(self.reports[layer])[-end:] for layer in self.layers]
        self.reports.clear()
        return torch.stack(by_layer, dim=1)[start:].numpy()
