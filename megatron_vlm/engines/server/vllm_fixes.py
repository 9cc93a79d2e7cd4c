"""Corrections of faults of vLLM 0.32: on the CPU, before the engine loads a model; in placeholder
counts of pictures that keep their sizes; in adapters of keys that are values as well."""

import re
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any


def fix_vllm_on_cpu() -> None:
    """Correct what would end the engine or change its weights."""
    _let_generators_rewind()
    _pack_updated_experts()
    _read_tied_heads()
    _draw_beside_drafts()
    _draft_beside_adapters()


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


def _draw_beside_drafts() -> None:
    """Give each place with a draft the temperature, the top_k and the top_p of its request. vLLM
    writes them into a copy that it drops, and would draw with what was in memory, without an
    error: mostly the most likely tokens, where the drafts are all rejected. A top_k would end the
    engine in a step without a draft."""
    from vllm.v1.sample import rejection_sampler

    cut = rejection_sampler.apply_top_k_top_p

    def expand(x: Any, ends: Any, total: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = ends.diff(prepend=ends.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts)

    def cut_any(logits: Any, top_k: Any, top_p: Any) -> Any:
        return cut(logits, top_k, top_p) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_top_k_top_p = cut_any


def _draft_beside_adapters() -> None:
    """Let an MTP head draft where adapters wrap the model's layers. Beside drafts vLLM looks for a
    convolution's plain weight at its wrapper, and would read the packed weight as if it were plain,
    without an error. The MTP head would look up the adapters of its tokens by their places in the
    model's batch, and the second draft would end the engine."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    read, share = (
        gdn_attention._unpacked_conv_weight,
        SpecDecodeBaseProposer._maybe_share_embeddings,
    )

    def read_plain(layer: Any) -> Any:
        return read(SimpleNamespace(conv1d=getattr(layer.conv1d, "base_layer", layer.conv1d)))

    def share_plain(self: Any, model: Any) -> None:
        share(self, model)
        inner = self.model.model
        inner.embed_tokens = getattr(inner.embed_tokens, "base_layer", inner.embed_tokens)

    gdn_attention._unpacked_conv_weight = read_plain
    SpecDecodeBaseProposer._maybe_share_embeddings = share_plain


_GEMMA4 = "vllm.model_executor.models.gemma4_mm"  # it is imported for a model of Gemma 4 alone


@cache
def count_given_sizes() -> None:
    """Let vLLM count the tokens of the pictures as they are in requests with do_resize=False. It
    measures its memory with others. The engine must have loaded its model.

    vLLM's processor of Gemma 4 counts the tokens of a picture that it would resize, also where it
    was told not to. A second resize would change every third size (with 280 tokens for a picture),
    and such a prompt would have another number of placeholders than features."""
    if (module := sys.modules.get(_GEMMA4)) is None:
        return
    processor, info = module.Gemma4MultiModalProcessor, module.Gemma4ProcessingInfo
    apply, count = processor.apply, info._compute_num_soft_tokens

    def apply_and_tell(self: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        self.info.resizes = inputs.hf_processor_mm_kwargs.get("do_resize", True)
        return apply(self, inputs, *more, **named)

    def count_as_told(
        self: Any, image_width: int, image_height: int, *more: Any, **named: Any
    ) -> Any:
        if getattr(self, "resizes", True):
            return count(self, image_width, image_height, *more, **named)
        vision = self.get_hf_config().vision_config
        side = vision.patch_size * vision.pooling_kernel_size
        return (image_height // side) * (image_width // side)

    processor.apply, info._compute_num_soft_tokens = apply_and_tell, count_as_told


_LAYER = re.compile(r"\.layers\.(\d+)\.")


def adapt_values_as_keys() -> None:
    """Give values the adapter of the keys that they are, in layers of full attention of Gemma 4.
    vLLM has a product for each, loads the weight of the keys into both, and would adapt the keys
    alone, without an error."""
    from vllm.lora.model_manager import LoRAModelManager

    look_up = LoRAModelManager._get_lora_layer_weights

    def look_up_keys(self: Any, adapter: Any, name: str) -> Any:
        if name.endswith(".v_proj") and _are_keys(self.model.config, name):
            name = f"{name.removesuffix('v_proj')}k_proj"
        return look_up(self, adapter, name)

    LoRAModelManager._get_lora_layer_weights = look_up_keys


def _are_keys(config: Any, name: str) -> bool:
    """Return whether the values of this module are the keys of its layer."""
    text, layer = getattr(config, "text_config", config), _LAYER.search(name)
    if layer is None or not getattr(text, "attention_k_eq_v", False):
        return False
    return bool(text.layer_types[int(layer[1])] == "full_attention")
