# .venv/bin/python -m pytest tests/model/test_constraints.py
"""Refusals in the configuration and on the built model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, Qwen2VLConfig

from megatron_vlm.config.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import families, family_of, read_sizes
from megatron_vlm.family.config_json import check_model_type
from megatron_vlm.model.constraints import check_built, check_config
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.training.worker import MegatronWorker
from tests.support.error_fields import raises

DIMS = ParallelDims(tp=1, pp=1, dp=1, ep=1, layers_per_stage=(4,))

CONFIG_REFUSALS = {
    "overlap_param_gather, each replica its own weights": (
        dict(
            parallel=ParallelConfig(
                overlap_param_gather=True, overlap_grad_reduce=True, distributed_optimizer=False
            )
        ),
        r"overlap_param_gather=true: .*; set parallel\.distributed_optimizer=true, or",
    ),
    "overlap_param_gather, one piece": (
        dict(parallel=ParallelConfig(overlap_param_gather=True, overlap_grad_reduce=False)),
        r"overlap_param_gather=true: .*; set parallel\.overlap_grad_reduce=true, or",
    ),
    "all frozen": (
        dict(model=ModelConfig("x", freeze_vision=True, freeze_merger=True, freeze_language=True)),
        r"^model\.freeze_language=true: ",
    ),
    "micro_batch_size": (dict(train=TrainConfig(micro_batch_size=0)), r"train\.micro_batch_size=0"),
    "backend": (dict(model=ModelConfig("x", backend="jax")), r"backend=jax; give torch"),
    "attention of te": (
        dict(model=ModelConfig("x", backend="te", attention="flash")),
        r"^model\.attention=flash: .*; set model\.attention=auto, or model\.backend=torch",
    ),
    "offload of te": (
        dict(model=ModelConfig("x", backend="te", offload_activations=0.5)),
        r"^model\.offload_activations=0\.5: .*; set model\.backend=torch",
    ),
    "offload above 1": (
        dict(model=ModelConfig("x", offload_activations=2.0)),
        r"^model\.offload_activations=2\.0; give 0 to 1",
    ),
    "recompute": (dict(model=ModelConfig("x", recompute="yes")), r"recompute=yes; give"),
    "precision": (dict(train=TrainConfig(precision="fp16")), r"precision=fp16; give auto"),
}


@pytest.mark.parametrize("name", CONFIG_REFUSALS)
def test_refused_in_the_configuration(name, tiny):
    change, message = CONFIG_REFUSALS[name]
    sizes = read_sizes(tiny())
    good = Config(model=ModelConfig("x"))
    check_config(good, sizes, DIMS)
    with pytest.raises(ConfigError, match=message):
        check_config(replace(good, **change), sizes, DIMS)


@pytest.mark.parametrize("other", ["qwen2_5_vl", "qwen3_next", "qwen4_exp", "qwen3_5_text", None])
def test_other_models_are_refused(other):
    """The remedy names the families whose chats are read."""
    with raises(ConfigError, key="model.path", found="x", problem_has=f"model_type={other!r}") as e:
        check_model_type(other, "x")
    read = families().keys() - {"gemma4"}
    assert all(f"'{model_type}'" in e.value.remedy for model_type in read)
    with raises(ConfigError, key="model.path", found="x", problem_has="model_type='qwen2_vl'"):
        family_of(Qwen2VLConfig(), "x")


@pytest.mark.parametrize(
    ("model_type", "advice"),
    [
        ("qwen2_vl", "TRL can train Qwen2-VL"),
        ("qwen3_moe", "can train Qwen3 (text alone)"),
        ("gemma4_unified", "can train Gemma 4 12B, or a part of Gemma 4"),
        ("deepseek_vl_v2", "ms-swift can train DeepSeek-VL"),
        ("qwen4_exp", "this version trains these"),
    ],
)
def test_what_trains_other_models_is_named(model_type, advice):
    with raises(ConfigError, key="model.path", remedy_has=advice) as caught:
        check_model_type(model_type, "x")
    assert caught.value.remedy.endswith(advice)


@pytest.mark.parametrize("experts", [0, 4])
def test_transformer_engine_has_no_gated_delta_nets(experts, tiny, tmp_path):
    """The folder has a config.json and no weights, and the refusal comes first."""
    path = tiny(family="qwen3_5", head_dim=64, experts=experts)
    AutoConfig.from_pretrained(path).save_pretrained(tmp_path)
    cfg = Config(model=ModelConfig(str(tmp_path), backend="te"))
    with raises(
        ConfigError,
        key="model.backend",
        found="te",
        problem_has="gated delta nets, gated attention, norms that multiply by 1 + weight",
        remedy_has="model.backend=torch",
    ):
        MegatronWorker(cfg)
    check_config(replace(cfg, model=ModelConfig("x")), read_sizes(tmp_path), DIMS)


def test_transformer_engine_needs_a_gpu(tiny):
    with raises(
        ConfigError, key="model.backend", found="te", problem_has="the CPU", remedy_has="=torch"
    ):
        MegatronWorker(Config(model=ModelConfig(tiny(), backend="te")))


def test_ep_needs_experts(tiny):
    with raises(ConfigError, key="parallel.ep", found=2, remedy_has="parallel.ep=1"):
        check_config(Config(model=ModelConfig("x")), read_sizes(tiny()), replace(DIMS, dp=2, ep=2))


QWEN3_5 = dict(family="qwen3_5", head_dim=64)


@pytest.mark.parametrize(
    ("tp", "message", "model"),
    [
        (3, "num_attention_heads=4", {}),
        (4, "num_key_value_heads=2", {}),
        (4, "num_key_value_heads=2", QWEN3_5 | dict(linear_key_heads=4)),
        (4, "linear_num_key_heads=2", QWEN3_5 | dict(kv_heads=4)),
    ],
)
def test_tp_must_divide_the_model(tp, message, model, tiny):
    """The error names the field, and the degrees that divide all of them."""
    sizes = read_sizes(tiny(**model))
    with raises(ConfigError, key="parallel.tp", found=tp, problem_has=message, allowed=[1, 2]):
        check_config(Config(model=ModelConfig("x")), sizes, replace(DIMS, tp=tp))


def test_too_few_layers_for_deepstack(tiny):
    sizes = read_sizes(tiny())
    sizes = replace(sizes, text=replace(sizes.text, layers=sizes.text.layers[:2]))
    with raises(ConfigError, key="text_config.num_hidden_layers", found=2, problem_has=3):
        check_config(Config(model=ModelConfig("x")), sizes, DIMS)


def built() -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
    )


BUILT_REFUSALS = {
    "sequence_parallel": dict(sequence_parallel=True),
    "context_parallel_size": dict(context_parallel_size=2),
    "num_moe_experts": dict(num_moe_experts=4, tensor_model_parallel_size=2),
    "variable_seq_lengths": dict(variable_seq_lengths=False),
    "calculate_per_token_loss": dict(calculate_per_token_loss=False),
    "virtual_pipeline_model_parallel_size": dict(virtual_pipeline_model_parallel_size=2),
}


@pytest.mark.parametrize("name", BUILT_REFUSALS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_refused_on_the_built_model(name):
    config = built()
    check_built(config, DIMS)
    for key, value in BUILT_REFUSALS[name].items():
        setattr(config, key, value)
    with raises(ConfigError, key=f"TransformerConfig.{name}", found=getattr(config, name)):
        check_built(config, DIMS)


def test_packed_rows_and_left_padding_are_refused_by_the_model():
    """The model's own forward refuses them, independent of the configuration."""
    model = SimpleNamespace(pre_process=True)
    ids = torch.zeros(2, 3, dtype=torch.long)
    with raises(ConfigError, key="packed_seq_params"):
        StageModel.forward(model, ids, ids, packed_seq_params=object())
    with raises(DataError, key="attention_mask[1]"):
        mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
        StageModel.forward(model, ids, ids, attention_mask=mask)
    with raises(DataError, key="attention_mask.shape", found=(1, 2, 3)):
        StageModel.forward(model, ids, ids, attention_mask=ids[None])
