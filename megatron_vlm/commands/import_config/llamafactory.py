"""LLaMA-Factory: the YAML file of `llamafactory-cli train`, with KEY=VALUE after it."""

from megatron_vlm.commands.import_config.data_rules import put_sets, translate_split
from megatron_vlm.commands.import_config.hugging_face import HF_DEFAULTS, SHARED_RULES
from megatron_vlm.commands.import_config.model_rules import put_adapters, wanted_adapters
from megatron_vlm.commands.import_config.run_rules import find_gpu_count, translate_device_batches
from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.training_rules import translate_rate
from megatron_vlm.commands.import_config.translation import Trainer, Translation


def _translate_adapters(t: Translation) -> None:
    if (setting := wanted_adapters(t)) is not None:
        put_adapters(t, setting, without=["merger"])  # never among `all` there


def _translate_data(t: Translation) -> None:
    """Set the sets that dataset_info.json describes."""
    folder = t.take("dataset_dir")
    info = f"{str(folder.value if folder else 'data').rstrip('/')}/dataset_info.json"

    def described(setting: Setting) -> list[str]:
        return [f"{info}:{each}" for each in t.words(setting)]

    put_sets(t, "dataset", "eval_dataset", described)
    translate_split(t)


def _translate_supervision(t: Translation) -> None:
    everything, last = t.switched_on("train_on_prompt"), t.given("mask_history")
    if everything is not None:
        t.put("data.train_on", ["system", "user", "assistant", "tool"], everything)
    elif last is not None and t.flag(last):
        t.put("data.train_on", "last_assistant", last)


LLAMA_FACTORY = Trainer(
    title="LLaMA-Factory",
    own_names="finetuning_type stage do_train cutoff_len dataset_dir lora_target quantization_bit "
    "image_max_pixels freeze_vision_tower freeze_multi_modal_projector pref_loss pref_beta "
    "preprocessing_num_workers overwrite_cache plot_loss neat_packing media_dir flash_attn "
    "val_size mask_history train_on_prompt enable_liger_kernel",
    defaults=HF_DEFAULTS
    | {
        **{"stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "lora_dropout": 0.0},
        **{"lora_target": "all", "freeze_vision_tower": True, "freeze_language_model": False},
        **{"freeze_multi_modal_projector": True, "dataset_dir": "data", "cutoff_len": 2048},
        **{"image_max_pixels": 768 * 768, "image_min_pixels": 32 * 32, "video_fps": 2.0},
        **{"video_maxlen": 128, "pref_loss": "sigmoid", "pref_beta": 0.1},
        "disable_gradient_checkpointing": False,
    },
    names={
        **{"rlhf_type": "stage", "tuner_type": "finetuning_type", "target_modules": "lora_target"},
        **{"max_length": "cutoff_len", "loss_type": "pref_loss", "beta": "pref_beta"},
        **{"rpo_alpha": "pref_ftx", "desirable_weight": "kto_chosen_weight"},
        **{"undesirable_weight": "kto_rejected_weight", "modules_to_save": "additional_target"},
        **{
            "label_smoothing": "dpo_label_smoothing",
            "early_stopping_patience": "early_stopping_steps",
        },
    },
    same={
        "data.max_pixels": "image_max_pixels",
        "data.min_pixels": "image_min_pixels",
        "data.video.fps": "video_fps",
        "data.video.max_frames": "video_maxlen",
        "data.video.min_frames": "video_minlen",
    },
    rules=(
        *(find_gpu_count, _translate_adapters, _translate_data, _translate_supervision),
        *(translate_device_batches, translate_rate, *SHARED_RULES),
    ),
)
