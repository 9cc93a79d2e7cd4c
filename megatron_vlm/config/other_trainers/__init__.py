"""Names of settings in other trainers (Hugging Face's Trainer, TRL, verl, ms-swift, LLaMA-Factory,
axolotl, Qwen's qwen-vl-finetune, Megatron-LM), each with our key for it or a sentence about what
does that here."""

from megatron_vlm.config.other_trainers.data_names import DATA_FAMILIES, DATA_SENTENCES
from megatron_vlm.config.other_trainers.model_names import MODEL_FAMILIES, MODEL_SENTENCES
from megatron_vlm.config.other_trainers.rl_names import RL_FAMILIES, RL_SENTENCES, SECTIONS
from megatron_vlm.config.other_trainers.run_names import RUN_FAMILIES, RUN_SENTENCES
from megatron_vlm.config.other_trainers.same_keys import SAME_KEYS
from megatron_vlm.config.other_trainers.training_names import TRAINING_FAMILIES, TRAINING_SENTENCES

OTHER_SENTENCES = (
    MODEL_SENTENCES | DATA_SENTENCES | TRAINING_SENTENCES | RL_SENTENCES | RUN_SENTENCES
)
# Names that begin like this, where no table has the whole name.
NAME_FAMILIES = MODEL_FAMILIES | DATA_FAMILIES | TRAINING_FAMILIES | RL_FAMILIES | RUN_FAMILIES

__all__ = ["NAME_FAMILIES", "OTHER_SENTENCES", "SAME_KEYS", "SECTIONS"]
