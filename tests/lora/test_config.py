# .venv/bin/python -m pytest tests/lora/test_config.py
"""The keys of `lora`: recipes, the weights that they choose, and refused values."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

from megatron_vlm.config import Config, from_yaml, load_config, to_yaml
from megatron_vlm.config.schema import ModelConfig
from megatron_vlm.config.trainable import USUAL, exports, learns, scale_of
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.lora.targets import adapted_specs, adapted_weights, is_of_experts, module_of
from megatron_vlm.model.constraints import check_supported
from megatron_vlm.rl.policy_engine import has_tower_weights
from tests.support.error_fields import raises
from tests.support.reference import load_reference

HAS = ["model.path=x", "lora=default"]


def test_recipes():
    off = load_config(["model.path=x"])
    assert off.lora.rank == 0 and exports(off) == ("model",)
    assert all(learns(off, part) for part in ("vision", "merger", "language"))
    language = load_config(HAS)
    assert (language.lora.rank, language.lora.alpha) == (16, 32)
    assert language.lora.targets == ("attention", "mlp") and exports(language) == ("adapter",)
    assert not any(learns(language, part) for part in ("vision", "merger", "language"))
    vision = load_config(["model.path=x", "lora=vision"])
    assert learns(vision, "merger") and not learns(vision, "vision")
    assert load_config([*HAS, "checkpoint.export=both"]).checkpoint.export == "both"
    assert exports(load_config([*HAS, "checkpoint.export=both"])) == ("adapter", "merged")
    assert exports(load_config([*HAS, "checkpoint.export=false"])) == ()
    assert load_config([*HAS, "lora.targets=[q_proj]", "~lora.targets"]).lora.targets == (
        "attention",
        "mlp",
    )
    assert from_yaml(to_yaml(vision)) == vision
    assert scale_of(load_config([*HAS, "lora.rslora=true"]).lora) == 8


@pytest.mark.full
def test_recipes_bring_the_rate_of_adapters():
    """It is also above that of recipes that train all weights, and an explicit one wins."""
    assert load_config(["model.path=x", "lora=qlora"]).lora == replace(USUAL, base="nf4")
    for name in ("default", "all", "vision", "qlora"):
        words = ["model=qwen3_vl_8b", "model.path=x", f"lora={name}"]
        optim = load_config([*words, "train=caltech101"]).optim
        assert (optim.lr, optim.vision_lr) == (1e-4, None)
        # lora=vision trains the projectors themselves.
        assert optim.merger_lr == (1e-5 if name == "vision" else None)
        given = load_config([*words, "optim.lr=3e-5", "optim.merger_lr=2e-5"]).optim
        assert (given.lr, given.merger_lr) == (3e-5, 2e-5)
    frozen = load_config(
        ["model=qwen3_vl_8b", "model.path=x", "lora=default", "optim=frozen_vision"]
    )
    assert frozen.optim.lr == 1e-4
    assert load_config(["model=qwen3_vl_8b", "model.path=x", "lora.rank=16"]).optim.lr == 1e-5


REFUSED = {
    "lora.alpha=8": dict(key="lora.alpha", found=8, problem_has="lora.rank=0"),
    "lora.targets=[mlp]": dict(key="lora.targets", found=("mlp",), problem_has="lora.rank=0"),
    "checkpoint.export=merged": dict(
        key="checkpoint.export", found="merged", allowed=(True, False)
    ),
    "lora=default checkpoint.export=peft": dict(
        key="checkpoint.export", found="peft", allowed_has="'adapter', 'merged', 'both'"
    ),
    "lora=default lora.targets=[]": dict(key="lora.targets", remedy_has="lora.rank=0"),
    "lora=default lora.train=[tower]": dict(
        key="lora.train", found=("tower",), allowed=("vision", "merger", "language")
    ),
    "lora=default lora.train=[merger] model.freeze_merger=true": dict(
        key="lora.train", found=("merger",), problem_has="model.freeze_merger=true"
    ),
    "lora=default lora.train=[language]": dict(
        key="lora.train", found=("language",), remedy_has="checkpoint.export=merged"
    ),
    "lora=default lora.rank=-1": dict(key="lora.rank", found=-1, allowed="at least 0"),
    "lora=default lora.dropout=1": dict(key="lora.dropout", found=1, allowed="0 to less than 1"),
    "lora=default lora.alpha=0": dict(key="lora.alpha", found=0, allowed_has="more than 0"),
    "lora=default data.add_tokens=['<a>']": dict(
        key="data.add_tokens", problem_has="lora.train without language"
    ),
    "lora.base=nf4": dict(key="lora.base", found="nf4", remedy_has="lora=default"),
    "lora=default lora.base=fp4": dict(key="lora.base", found="fp4", allowed_has="nf4"),
    "lora=both": dict(key="lora", found="both", remedy_has="all, default, none, qlora, vision"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    with raises(ConfigError, **REFUSED[words]):
        load_config(["model.path=x", *words.split()])


def test_transformer_engine_is_refused_with_the_reason():
    cfg = load_config([*HAS, "model.backend=te"])
    with raises(ConfigError, key="lora.rank", found=16, remedy_has="model.backend=torch"):
        check_supported(cfg)


DECODER = "model.language_model.layers."


def namer(path: str) -> Callable[..., list[str]]:
    """Return names(*targets): the modules with an adapter, without the decoder's prefix."""
    tensors = read_sizes(path).tensors

    def names(*targets: str) -> list[str]:
        return [module_of(each).removeprefix(DECODER) for each in adapted_specs(tensors, targets)]

    return names


def test_targets_are_parts_names_and_patterns(tiny):
    names = namer(tiny())
    assert len(names("attention")) == 4 * 4 and len(names("mlp")) == 4 * 3
    assert {name.rpartition(".")[2] for name in names("vision_attention")} == {"qkv", "proj"}
    assert {name.rpartition(".")[2] for name in names("vision_mlp")} == {"linear_fc1", "linear_fc2"}
    assert all("merger" in name for name in names("merger")) and len(names("merger")) >= 4
    assert names("layers.1.mlp.up_proj") == ["1.mlp.up_proj"]
    assert len(names("layers.[0-2].self_attn.?_proj")) == 3 * 4
    every = ("attention", "mlp", "merger", "vision_attention", "vision_mlp")
    assert len(names(*every)) == sum(len(names(each)) for each in every)
    with raises(ConfigError, key="lora.targets", found="qproj", remedy_has="q_proj"):
        names("mlp", "qproj")
    with raises(ConfigError, key="lora.targets", found="embed_tokens", remedy_has="attention"):
        names("embed_tokens")


@pytest.fixture(scope="module")
def recipes():
    words = {name: ["model.path=x", f"lora={name}"] for name in ("default", "all", "vision")}
    return {name: load_config(given) for name, given in words.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_adapted_where_it_is_named(tied, tiny, recipes):
    sizes = read_sizes(tiny(tied=tied))

    def of_targets(*targets: str, **more) -> Config:
        cfg = recipes["default"]
        return replace(cfg, lora=replace(cfg.lora, targets=targets, **more))

    def names(*targets: str) -> list[str]:
        return [module_of(each) for each in adapted_weights(of_targets(*targets), sizes)]

    assert names("head") == names("lm_head") == ["lm_head"]
    assert names("attention", "head")[-1] == "lm_head" and len(names("attention", "head")) == 17
    for targets in (("attention", "mlp"), ("merger",), ("vision_attention", "vision_mlp")):
        assert "lm_head" not in names(*targets)
    for cfg in recipes.values():
        assert "lm_head" not in map(module_of, adapted_weights(cfg, sizes))
    assert "lm_head" in names("*")
    for targets, has_tower in (
        ("head", False),
        ("mlp", False),
        ("merger", True),
        ("vision_mlp", True),
    ):
        assert has_tower_weights(adapted_specs(sizes.with_head, (targets,))) == has_tower  # vLLM
    frozen = replace(of_targets("head"), model=ModelConfig("x", freeze_language=True))
    for cfg, key in (
        (of_targets("head", train=("language",)), "lora.targets"),
        (frozen, "model.freeze_language"),
    ):
        with raises(ConfigError, key=key, problem_has="lm_head of the part language"):
            adapted_weights(cfg, sizes)


def test_experts_are_of_the_mlp_and_routers_get_no_adapters(tiny):
    """PEFT sees experts as two weights, and a router is none of its linear layers."""
    names = namer(tiny(experts=4, layers=3, dense_layers=1))
    both = [f"{n}.mlp.experts.{end}" for n in (1, 2) for end in ("gate_up_proj", "down_proj")]
    dense = [f"0.mlp.{end}_proj" for end in ("gate", "up", "down")]
    assert names("mlp") == dense + both and names("mlp.experts.*_proj") == both
    assert names("down_proj") == [dense[2], both[1], both[3]]
    assert names("layers.0.mlp.*_proj") == dense
    assert not [each for each in names("layers.1.*", "layers.2.*") if each.endswith("gate")]
    for target in ("mlp.gate", "layers.1.mlp.gate", "gate"):
        problem = f"router {DECODER}1.mlp.gate,"
        with raises(ConfigError, key="lora.targets", found=target, problem_has=problem):
            names("attention", target)


def test_both_mixers_are_of_attention(tiny):
    """The convolution has no adapter: in transformers it is no linear layer."""
    names = namer(tiny(family="qwen3_5", head_dim=64))
    linear = [f"linear_attn.{end}" for end in ("in_proj_qkv", "in_proj_z", "in_proj_b")]
    linear += ["linear_attn.in_proj_a", "linear_attn.out_proj"]
    full = [f"self_attn.{letter}_proj" for letter in "qkvo"]
    every = [f"{n}.{end}" for n in range(3) for end in linear] + [f"3.{end}" for end in full]
    assert names("attention") == every
    assert names("linear_attn.*") == every[:15] and names("self_attn.*") == every[15:]
    assert names("in_proj_?") == [each for each in every if each[:-1].endswith("in_proj_")]
    assert names("layers.1.linear_attn.in_proj_qkv") == ["1.linear_attn.in_proj_qkv"]
    assert len(names("attention", "mlp", "head")) == 19 + 12 + 1
    # A pattern of Qwen3-VL's tower does not match the mixers, nor theirs the tower.
    assert all(".visual." in name for name in names("attn.*"))
    for absent in ("conv1d", "in_proj_ba", "in_proj_qkvz", "A_log", "layers.0.self_attn.q_proj"):
        with raises(ConfigError, key="lora.targets", found=absent, remedy_has="in_proj_qkv"):
            names("attention", absent)


def test_the_shared_expert_and_its_gate_are_of_the_mlp(tiny):
    """The gate is a linear layer in transformers, as the router is not."""
    names = namer(tiny(family="qwen3_5", head_dim=64, experts=4))
    shared = [f"shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    each = ["experts.gate_up_proj", "experts.down_proj", *shared, "shared_expert_gate"]
    assert names("mlp") == [f"{n}.mlp.{end}" for n in range(4) for end in each]
    assert names("shared_expert_gate") == [f"{n}.mlp.shared_expert_gate" for n in range(4)]
    assert names("shared_expert.*") == [f"{n}.mlp.{end}" for n in range(4) for end in shared]
    with raises(ConfigError, key="lora.targets", found="mlp.gate", problem_has="the router"):
        names("mlp", "mlp.gate")


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(
    ("sizes", "targets"),
    [
        (dict(family="qwen3_5", head_dim=64), ("attention", "mlp")),
        (
            dict(family="gemma4", layers=2),
            ("attention", "mlp", "merger", "vision_attention", "vision_mlp", "input_proj"),
        ),
    ],
)
def test_all_linear_of_peft_means_every_group_of_linear_layers(sizes, targets, experts, tiny):
    """In the decoder, PEFT's all-linear is attention with mlp; experts are no linear layers. It
    would adapt Gemma 4's routers, too."""
    path = tiny(**sizes, experts=experts)
    model = get_peft_model(load_reference(path), PeftConfig(target_modules="all-linear"))
    adapted = {
        name.partition(".lora_A")[0].removeprefix("base_model.model.")
        for name, _ in model.named_parameters()
        if ".lora_A." in name and ".visual." not in name and ".router." not in name
    }
    tensors = read_sizes(path).tensors
    chosen = adapted_specs(tensors, targets)
    assert adapted == {module_of(each) for each in chosen if not is_of_experts(each)}
    assert all(tensor.learns and len(tensor.shape) > 1 for tensor in tensors if tensor.lora_group)
    if experts:
        name = "proj" if sizes["family"] == "gemma4" else "mlp.gate"
        with raises(ConfigError, key="lora.targets", found=name, problem_has="the router"):
            adapted_specs(tensors, (name,))


def test_dropout_for_experts_is_refused_as_peft_refuses_it(tiny):
    sizes = read_sizes(tiny(experts=4, layers=3, dense_layers=1))
    cfg = load_config([*HAS, "lora.dropout=0.1"])
    targets = "lora.targets=[attention,mlp]"
    with raises(ConfigError, key="lora.dropout", found=0.1, problem_has=targets):
        adapted_weights(cfg, sizes)
    dense = load_config([*HAS, "lora.dropout=0.1", "lora.targets=[attention,layers.0.mlp.*_proj]"])
    assert adapted_weights(dense, sizes)
