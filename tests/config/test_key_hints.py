# .venv/bin/python -m pytest tests/config/test_key_hints.py
"""Names from other trainers are answered with our key, or with the keys that exist."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from megatron_vlm.cli import main
from megatron_vlm.config import config_dir, known_keys, load_config
from megatron_vlm.config.key_hints import (
    hint,
    hint_sentence,
    option_error,
    recipe_error,
    similar_keys,
)
from megatron_vlm.config.other_trainers import NAME_FAMILIES, OTHER_SENTENCES, SAME_KEYS, SECTIONS
from megatron_vlm.config.other_trainers.model_names import MODEL_NAMES
from megatron_vlm.config.other_trainers.training_names import TRAINING_NAMES
from megatron_vlm.config.schema import key_types, leaves
from megatron_vlm.errors import ConfigError, sentences
from tests.support.error_fields import raises
from tests.support.tables import in_one_test
from tests.support.trainer_examples import texts
from tests.support.trainer_scripts import FILES, SCRIPTS

# Names of others in other spellings and sections, names that this package has elsewhere, and near
# misses. The plain names of the tables have a test of their own.
KEYS = {
    "optim.learning_rate": "optim.lr",
    "optimizer.lr": "optim.lr",
    "lr": "optim.lr",
    "model.name_or_path": "model.path",
    "lora.r": "lora.rank",
    "peft.r": "lora.rank",
    "log.rank": "lora.rank",
    "weight_decay": "optim.weight_decay",
    "max_pixels": "data.max_pixels",
    "MAX_PIXELS": "data.max_pixels",
    "freeze-ViT": "model.freeze_vision",
    "actor_rollout_ref.rollout.n": "rl.samples",
    "actor_rollout_ref.rollout.temperature": "rl.temperature",
    "actor_rollout_ref.actor.optim.lr": "optim.lr",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "parallel.tp",
    "actor_rollout_ref.model.path": "model.path",
    "algorithm.filter_groups.enable": "rl.dynamic_sampling",
    "data.max_response_length": "rl.max_new_tokens",
    "global_batch_size": "train.global_batch_size",
    "modle.path": "model.path",
    "model.pth": "model.path",
    "optim.lrr": "optim.lr",
    "train.step": "train.steps",
    "data.max_token": "data.max_tokens",
    "checkpoint.keep_lsat": "checkpoint.keep_last",
    "rl.teacher_top_k": "teacher.top_k",
    "serve.engine_max_len": "engine.max_len",
}
SENTENCES = {
    "use_lora": "lora=default trains adapters",
    "parallel.cp": "there is no context parallelism",
    "parallel.sequence_parallel": "there is no sequence parallelism",
    "lora.target_modules": "lora.targets is a list",
    "video_max_pixels": "all frames of a video together",
    "per_device_train_batch_size": "train.micro_batch_size is the rows of one pass",
    "gradient_accumulation_steps": "train.global_batch_size is the samples of a whole step",
    "lr_scheduler_type": "constant, linear, cosine or wsd",
    "load_best_model_at_end": "checkpoint.best=SET/SCORE",
    "cache_dir": "downloads of the Hub are where HF_HOME says",
    "beta": "GRPO's beta is rl.kl_coef",
    "critic.optim.lr": "no critic is trained",
    "reward_model.model.path": "rl.reward=model:FOLDER is an export",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.generate=true asks for a greedy",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine.devices lists the GPUs",
    "actor_rollout_ref.rollout.top_k": "as -1 does there",
    "model.fp8_recipe": "it has not run on a GPU",
    "galore_anything": "few weights are trained by adapters",
}
# Values that people write for these keys in other trainers. All other keys take a whole number.
_SWITCH, _DATA = ("true", "false", "True"), ("chats.jsonl", "[a.json,b.json]", "org/name")
TYPICAL: dict[str, tuple[str, ...]] = {
    "model.path": ("Qwen/Qwen3-VL-2B-Instruct", "/models/base"),
    "model.recompute": ("full", "selective"),
    **{f"model.freeze_{part}": _SWITCH for part in ("vision", "merger", "language")},
    **dict.fromkeys(("parallel.distributed_optimizer", "data.shuffle", "eval.generate"), _SWITCH),
    "rl.dynamic_sampling": _SWITCH,
    **dict.fromkeys(("optim.min_lr_ratio", "rl.kl_coef", "rl.entropy_coef"), ("0.1", "0")),
    **dict.fromkeys(("rl.clip_low", "rl.clip_high"), ("0.2",)),
    "rl.max_weight": ("2.0",),
    "data.split": ("0.1", "100"),
    "data.system": ("You are brief.",),
    "data.template_kwargs": ("{enable_thinking: false}",),
    "checkpoint.push": ("org/name",),
    **dict.fromkeys(("data.train", "data.eval"), _DATA),
    "data.image_root": ("images",),
    **dict.fromkeys(("optim.lr", "optim.vision_lr", "optim.merger_lr", "optim.eps"), ("1e-5",)),
    **dict.fromkeys(("optim.beta1", "optim.beta2"), ("0.9", "0.95")),
    "optim.clip_grad": ("1.0", "1"),
    "optim.warmup_ratio": ("0.03",),
    "lora.alpha": ("16", "32.0"),
    "lora.dropout": ("0.05",),
    "lora.rslora": _SWITCH,
    "lora.path": ("out/adapter",),
    "log.project": ("project",),
    "run": ("out/first",),
}
# Values that sentences list in words. Other sentences give whole settings: model.backend=te.
NAMED = {
    "train.precision": ("auto", "bf16", "fp32"),
    "optim.schedule": ("constant", "linear", "cosine", "wsd"),
    "checkpoint.resume": ("auto", "never"),
    "rl.advantage": ("grpo", "rloo", "dr_grpo"),
    "rl.aggregate": ("tokens", "sequences", "constant"),
    "rl.loss": ("ppo", "gspo", "cispo", "importance_sampling"),
}
NOTHING = {
    "foo": "the groups of keys are model, lora, parallel, data",
    "rank.foo": "the groups of keys are",
    "log.xx": "the keys of log are every, trackers",
    "optim.xx": "the keys of optim are name, lr, vision_lr",
    "parallel.xx": "the keys of parallel are auto, tp, pp",
}


def test_a_name_in_two_groups_is_answered_with_both():
    remedy = "'eval.max_new_tokens' or 'rl.max_new_tokens'"
    with raises(ConfigError, key="max-new-tokens", remedy_has=remedy):
        load_config(["max-new-tokens=1"])


@in_one_test("wrong", KEYS)
def test_answered_with_our_key(wrong):
    with raises(ConfigError, key=wrong, remedy=f"did you mean {KEYS[wrong]!r}?"):
        load_config([f"{wrong}=1"])


@in_one_test("wrong", SENTENCES)
def test_answered_with_what_there_is(wrong):
    with raises(ConfigError, key=wrong, remedy_has=SENTENCES[wrong]) as caught:
        load_config([f"{wrong}=1"])
    assert "did you mean" not in caught.value.remedy


@in_one_test("wrong", NOTHING)
def test_only_near_names_are_suggested(wrong):
    assert similar_keys(wrong) == [] and hint_sentence(wrong) is None
    assert NOTHING[wrong] in hint(wrong)


def test_several_keys_of_that_name_are_all_named():
    assert hint("seed") == "did you mean 'data.seed' or 'train.seed'?"


def test_the_tables_name_keys_that_exist_and_no_name_twice():
    assert set(SAME_KEYS) <= set(known_keys())
    tables = (SAME_KEYS, MODEL_NAMES, TRAINING_NAMES)
    names = [name for table in tables for row in table.values() for name in row.split()]
    assert len(names) == len(set(names)) and not set(names) & set(known_keys())
    assert set(SECTIONS) <= set(names)
    # No group of keys begins as a family does, so that a near miss of a key is still answered.
    starts = tuple(NAME_FAMILIES)
    assert not [key for key in leaves() if key.rpartition(".")[2].startswith(starts)]


LISTS = sorted((Path(__file__).parents[1] / "golden" / "trainer_keys").glob("*.txt"))
# Names that people type, though no example of tests/support has them and one list at most.
TYPED = """
adamw additional_target assistant_only_loss clip_ratio completion_only_loss compute_metrics critic
custom_reward_function dataset_dir dataset_text_field eval_batch_size filter_groups fps hydra
init_lora_weights interleave_prob interleave_probs kl_ctrl kto_chosen_weight limit_mm_per_prompt
load_best_model_at_end loss_agg_mode mask_history mask_truncated_completions max_seq_length
max_turns min_p mix_strategy multi_turn muon neat_packing new_special_tokens overlong_buffer
override_config peft peft_config precompute_ref_log_probs pref_ftx profiler prompt_key
quantization_bit ray_kwargs revision reward_manager roles_to_train rollout.top_k rollout_correction
rollout_is sequence_parallel_size tokenizer tokens train_on_inputs train_on_prompt
ulysses_sequence_parallel_size use_cache use_chat_template use_lora use_swanlab val_kwargs
video_max_frames video_maxlen video_min_frames
"""


def parts_of(names: Iterable[str]) -> set[str]:
    """Return the ends of dotted names, and each of their parts, in the spelling of the tables."""
    plain = [name.replace("-", "_").lower().split(".") for name in names]
    ends = [parts[start:] for parts in plain for start in range(len(parts))]
    return {mark.join(end) for end in ends for mark in "._"} | {end[0] for end in ends}


def test_answered_are_the_names_of_examples_and_those_that_two_lists_have():
    """Answers to rarely used names are not worth their place: they get the list of the groups."""
    examples = [text for _, text in texts().values()] + [text for text, *_ in SCRIPTS.values()]
    in_examples = parts_of(re.findall(r"[A-Za-z_][\w.-]*", "\n".join([*examples, *FILES.values()])))
    listed = [parts_of(file.read_text().split()) for file in LISTS]
    documented = {name for name, count in Counter(chain(*listed)).items() if count > 1}
    assert OTHER_SENTENCES.keys() - in_examples - documented == set(TYPED.split())
    whole = Counter(chain(*(set(file.read_text().split()) for file in LISTS)))
    for name in {name for name, count in whole.items() if count > 1} - set(key_types()):
        assert set(similar_keys(name)) <= set(leaves()), name
        assert bool(similar_keys(name)) != bool(hint_sentence(name)), name


def spellings(name: str) -> tuple[str, ...]:
    return name, f"training.{name}", name.replace("_", "-")


@cache
def accepted(setting: str) -> None:
    more = ["lora.rank=8"] if setting.startswith("lora.") and "lora.rank" not in setting else []
    more += ["model.path=base"] if "model.path" not in setting else []
    load_config([setting, *more])


@in_one_test("key", SAME_KEYS)
def test_every_name_of_others_leads_to_a_key(key):
    value = TYPICAL.get(key, ("2",))[0]
    for name in SAME_KEYS[key].split():
        hints = [hint(written) for written in spellings(name)]
        assert hints == [f"did you mean {key!r}?"] * 3
        assert option_error(f"--{name}", value).remedy == f"write {key}={value}"


def test_the_values_that_people_write_are_taken():
    """A composition takes a tenth of a second, so each has many keys."""
    settings = {key: TYPICAL.get(key, ("2",)) for key in SAME_KEYS}
    for number in range(max(map(len, settings.values()))):
        given = [f"{key}={values[number % len(values)]}" for key, values in settings.items()]
        load_config(["optim=muon", *given])


@in_one_test("name", OTHER_SENTENCES)
def test_names_of_others_without_a_key_are_answered_with_their_sentence(name):
    assert [hint(written) for written in spellings(name)] == [OTHER_SENTENCES[name]] * 3


@pytest.mark.full
@in_one_test("text", {*OTHER_SENTENCES.values()})
def test_every_sentence_names_keys_and_values_that_are_accepted(text):
    groups = "|".join(sorted({key.partition(".")[0] for key in leaves() if "." in key}))
    for key in re.findall(rf"(?<!/)\b(?:{groups})\.\w+", text):
        assert key in leaves(), key
    for key, values in NAMED.items():
        for value in values if text.startswith(f"{key} is ") else ():
            assert value in text
            accepted(f"{key}={value}")
    for setting in re.findall(
        rf"\b((?:(?:{groups})\.\w+|run)=(?:\{{.*?\}}|[\w/]+(?:\.\d+)?))", text
    ):
        if setting != "checkpoint.best=SET/SCORE":  # needs a set of data.eval
            accepted(setting)
    if "checkpoint.best=SET/SCORE" in text:
        load_config(["model.path=x", "checkpoint.best=held/loss", "data.eval={held: a.jsonl}"])


@in_one_test(
    ("words", "answer"),
    [
        (["--lr", "1e-5"], "--lr=1e-5: settings are given as KEY=VALUE; write optim.lr=1e-5"),
        (["--model.path", "DIR", "optim.lr=1"], "write model.path=DIR"),
        (["--train.steps", "optim.lr=1"], "write train.steps=VALUE"),
        (["--train.packing", "true"], "--train.packing=true: .* rows are never packed"),
        (["optim.lr=1", "--output_dir", "out"], "write run=out"),
        (["--use_lora", "true"], "--use_lora=true: .* lora=default trains adapters"),
        (["--seed", "-1"], "did you mean 'data.seed' or 'train.seed'"),
        (["--model", "Qwen/Qwen3-VL"], "write model.path=Qwen/Qwen3-VL"),
        (["--lora"], "lora=NAME chooses a recipe, lora.KEY=VALUE sets a value"),
        (["--predictions", "x"], "--predictions is not an option of train; .* --help lists"),
        (["--dryrun"], "--dryrun is not an option; did you mean --dry-run"),
        (["--frobnicate", "3"], "--frobnicate=3 is not an option; the groups of keys are"),
        (["-c", "my.yaml"], "-c is not an option; did you mean --config"),
        (["gpus=2"], "gpus is not a configuration key; did you mean 'launch.processes'"),
        (
            ["model.path=x", "data.train=[a.jsonl,", "b.jsonl]", "optim.lr=1"],
            r"cut this value at its spaces; put it in quotes: 'data.train=\[a.jsonl, b.jsonl\]'$",
        ),
        (["data.eval={a:", "b,", "c:", "d}"], "in quotes: 'data.eval={a: b, c: d}'$"),
        (["data.train=[a.jsonl,", "b.jsonl"], "b.jsonl: arguments are given as KEY=VALUE"),
        (["mine.yaml"], "mine.yaml: .*write --config mine.yaml"),
        (["train"], "train: arguments are given as KEY=VALUE$"),
        (
            ["Qwen/Qwen3-VL-2B-Instruct", "chats.jsonl"],
            "write model=qwen3_vl_2b model.path=Qwen/Qwen3-VL-2B-Instruct data.train=chats.jsonl",
        ),
        (["qwen3_vl_2b", "optim.lr=1", "tests"], "write model=qwen3_vl_2b data.train=tests"),
        (["model.path=x", "optim.lr=1e-5x"], "optim.lr=1e-5x; give a number$"),
        (["model.path=x", "optim.lr=null"], "optim.lr=null; give a number$"),
        (["model.path=x", "train.steps=1.5"], "train.steps=1.5; give a whole number$"),
        (["model.path=x", "eval.generate=maybe"], "eval.generate=maybe; give true or false$"),
        (["model.path=x", "run=[1]"], r"run=\[1\]; give text$"),
        (["model.path=x", "train.precision=[a]"], "; give auto, fp32 or bf16$"),
        (["model.path=x", "train.objective=grpo"], "write megatron-vlm rl with .* rl=grpo$"),
    ],
)
def test_options_are_answered_with_what_to_write(words, answer, capfd):
    assert main(["train", *words]) == 2
    output = capfd.readouterr().err
    assert output.startswith("megatron-vlm: ") and len(output.splitlines()) == 1
    assert re.search(answer, output.strip()), output


def test_help_names_every_key_and_recipe_and_needs_no_torch():
    code = (
        "import sys\nfrom megatron_vlm.cli import main\n"
        "for words in ([], ['train'], ['rl'], ['serve'], ['eval'], ['inspect'], ['chat']):\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as error: assert not error.code\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    output = done.stdout
    assert output.rstrip().endswith("set()") and output.count("--config FILE") >= 3
    words = output.split()
    for key in leaves():
        assert key.rpartition(".")[2] in words, key
    for file in config_dir().glob("*/*.yaml"):
        assert file.stem in words or file.stem == "default"
    for command in ("train", "eval", "export", "chat", "report", "doctor", "inspect"):
        assert f"    {command}" in output


def test_all_unknown_keys_are_answered_at_once(capfd):
    words = ["learning_rate=1e-5", "optim.beta1=0.9", "num_generations=8", "model=Qwen/Qwen3-VL-2B"]
    with raises(ConfigError, key="learning_rate", remedy="did you mean 'optim.lr'?") as caught:
        load_config(words)
    lines = sentences(caught.value)
    assert lines == str(caught.value).splitlines() and len(lines) == 3
    assert "num_generations" in lines[1]
    assert "model=qwen3_vl_2b model.path=Qwen/Qwen3-VL-2B" in lines[2]
    assert main(["train", *words]) == 2
    assert capfd.readouterr().err.splitlines() == [f"megatron-vlm: {line}" for line in lines]


@in_one_test(
    ("setting", "answer"),
    [
        (
            "model=Qwen/Qwen3-VL-2B-Instruct",
            "did you mean model=qwen3_vl_2b model.path=Qwen/Qwen3-VL-2B-Instruct?",
        ),
        ("model=/models/base", "did you mean model.path=/models/base?"),
        ("model=org/Qwen3.5-0.8B@main", "model=qwen3_5_0_8b model.path=org/Qwen3.5-0.8B@main?"),
        ("model=Qwen/Qwen3-VL-30B-A3B", "did you mean model=qwen3_vl_30b_a3b model.path="),
        ("model=tests", "did you mean model.path=tests?"),
        ("model=qwen3-vl-2b", "did you mean model=qwen3_vl_2b?"),
        ("model=qwen3_vl_2", "did you mean model=qwen3_vl_2b?"),
        ("model=gpt", "choose one of default, gemma4_26b_a4b"),
        ("model=", "choose one of default, gemma4_26b_a4b"),
        ("data=chats.jsonl", "did you mean data.train=chats.jsonl?"),
        ("optim=adamw_torch", "AdamW is what runs"),
        ("optim=frozen_visoin", "did you mean optim=frozen_vision?"),
        ("optim=cosine", "did you mean optim.schedule=cosine?"),
        ("optim={lr: 1}", "AdamW is what runs"),
        ("lora=true", "did you mean lora=default?"),
        ("rl=ppo", "no critic is trained"),
        ("rl=grpoo", "did you mean rl=grpo?"),
        ("parallel=tp", "did you mean parallel.tp=VALUE?"),
    ],
)
def test_a_value_that_is_no_recipe_is_answered_with_the_key_that_takes_it(setting, answer):
    group, _, value = setting.partition("=")
    with raises(ConfigError, key=group, found=value, remedy_has=answer, problem="is not a recipe"):
        load_config([setting, "model.path=x"])


def test_the_answers_to_values_name_keys_and_recipes_that_exist():
    for group, value in [("rl", "ppo"), ("rl", "dpo"), ("optim", "sgd")]:
        remedy = recipe_error(group, value).remedy
        settings = re.findall(r"\b(?:rl|lora)(?:\.loss)?=\w+", remedy)
        for setting in settings:
            load_config([setting, "model.path=x"])
        keys = re.findall(r"\b(?:optim|rl)\.\w+", remedy)
        assert (settings or keys) and set(keys) <= set(leaves()), remedy


@in_one_test(
    ("setting", "answer"),
    [
        ("checkpoint.resume=true", "auto (the newest checkpoint of run"),
        ("checkpoint.resume=latest", "auto (the newest checkpoint of run"),
        ("model.path=base,", "remove the comma at its end: model.path=base"),
        ("model.path=a,b", "'model.path=[a,b]'"),
        ("model.path=<a>", "signs such as < or &"),
    ],
)
def test_a_value_of_other_trainers_is_refused_at_once(setting, answer):
    key, _, value = setting.partition("=")
    with raises(ConfigError, key=key, found=value.lower(), remedy_has=answer):
        load_config(["model.path=x", setting])


@in_one_test(
    ("command", "answer"),
    [
        ("evaluate", "did you mean eval?"),
        ("trian", "did you mean train?"),
        ("sft", "did you mean train?"),
        ("merge", "did you mean export? With --as merged"),
        ("deploy", "docs/deploy.md"),
        ("dpo", "train.objective=dpo"),
        ("gkd", "rl=distill"),
        ("embedding", "train.objective=embed"),
        ("model.path=x", "did you mean `megatron-vlm train model.path=x`?"),
        ("frobnicate", "the commands are train, rl, serve,"),
    ],
)
def test_a_command_that_does_not_exist_is_answered_with_the_nearest(command, answer, capfd):
    assert main([command, "x=1"]) == 2
    output = capfd.readouterr().err
    assert output.startswith(f"megatron-vlm: {command} is not a command; ") and answer in output
