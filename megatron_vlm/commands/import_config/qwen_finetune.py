"""Qwen's qwen-vl-finetune: `train_qwen.py` with its options."""

from megatron_vlm.commands.import_config.hugging_face import HF_DEFAULTS, SHARED_RULES
from megatron_vlm.commands.import_config.model_rules import put_adapters
from megatron_vlm.commands.import_config.run_rules import find_gpu_count, translate_device_batches
from megatron_vlm.commands.import_config.training_rules import translate_rate
from megatron_vlm.commands.import_config.translation import Trainer, Translation

# For each part of a model: what trains it there, and our keys that freeze it and set its rate.
_PARTS = {
    "tune_mm_llm": ("model.freeze_language", "", ""),
    "tune_mm_mlp": ("model.freeze_merger", "mm_projector_lr", "optim.merger_lr"),
    "tune_mm_vision": ("model.freeze_vision", "vision_tower_lr", "optim.vision_lr"),
}


def _translate_parts(t: Translation) -> None:
    """Set adapters, or else which parts learn and at which rates."""
    if (adapters := t.switched_on("lora_enable")) is not None:
        put_adapters(t, adapters)
    projector = t.positive("mm_projector_lr")
    for tuned, (frozen, rate_name, rate_key) in _PARTS.items():
        setting, rate = t.take(tuned), t.positive(rate_name)
        if not t.has_lora:
            t.put(frozen, not t.flag(setting), setting)
        if rate is not None and not t.has_lora and t.flag(setting) and projector is not None:
            t.copy_setting(rate_key, rate)
        elif rate is not None:
            t.differ("no effect there: mm_projector_lr is absent, or the part is frozen", rate)
    if not t.has_lora and t.flag(t.take("tune_mm_mlp")) != t.flag(t.take("tune_mm_vision")):
        t.differ("DeepStack's mergers learn with the merger here, with the vision tower there")


def _translate_data(t: Translation) -> None:
    """Ask for the files of the sets, whose names only Python code of the trainer explains."""
    t.differ(
        "data_dict in qwenvl/data/__init__.py, which is not read, has the files of these names: "
        "give data.train=[{path: ANNOTATION_PATH, image_root: DATA_PATH}], with weight: 0.5 in "
        "place of a name's %50",
        t.given("dataset_use"),
    )
    flat, packed = t.switched_on("data_flatten"), t.switched_on("data_packing")
    if flat or packed:
        t.differ(
            "records over data.max_tokens are left as they are there, and cut here", flat, packed
        )
    if packed is not None:
        t.differ("a batch counts packs of records there, and records here", packed)


QWEN_FINETUNE = Trainer(
    title="qwen-vl-finetune",
    own_names="dataset_use tune_mm_vision tune_mm_mlp tune_mm_llm data_flatten data_packing "
    "base_interval lora_enable model_max_length mm_projector_lr vision_tower_lr",
    defaults=HF_DEFAULTS
    | {
        **{"tune_mm_llm": False, "tune_mm_mlp": False, "tune_mm_vision": False, "lora_r": 64},
        **{"lora_alpha": 128, "lora_dropout": 0.05, "model_max_length": 512},
        **{"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        **{"max_pixels": 576 * 28 * 28, "min_pixels": 16 * 28 * 28, "video_fps": 2.0},
        **{"video_max_frames": 8, "video_min_frames": 4, "video_max_pixels": 1024 * 28 * 28},
        "video_min_pixels": 256 * 28 * 28,
    },
    names={
        **{"max_length": "model_max_length", "lora_rank": "lora_r"},
        "target_modules": "lora_target_modules",
    },
    same={
        **{f"data.{name}": name for name in ("max_pixels", "min_pixels")},
        **{
            f"data.video.{name}": f"video_{name}"
            for name in ("fps", "max_frames", "min_frames", "max_pixels", "min_pixels")
        },
    },
    rules=(
        *(find_gpu_count, _translate_parts, _translate_data, translate_device_batches),
        *(translate_rate, *SHARED_RULES),
    ),
)
