"""Settings that no rule has read: those with a key of the same meaning here, and those without
one."""

import re
from dataclasses import dataclass, field

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation, is_nothing, is_off
from megatron_vlm.config.key_hints import counterpart_of
from megatron_vlm.config.schema import key_types, leaves
from megatron_vlm.errors import ConfigError

# Names that this package has, too, in a group; the tables have only other names.
_OWN_NAMES = {"num_workers": "data.num_workers", "max_tokens": "data.max_tokens"}
# These names change what is learnt, where they are used at all.
_CHANGES = (
    "use_dora loraplus_lr_ratio lora_bias neftune_noise_alpha enable_dft_loss packing "
    "neat_packing sample_packing padding_free max_samples template chat_template modules_to_save "
    "additional_target lora_modules_to_save freeze_parameters freeze_parameters_ratio "
    "freeze_parameters_regex trainable_parameters unfrozen_parameters streaming mix_strategy "
    "interleave_probs moe_expert_capacity_factor mtp_num_layers"
    "f_divergence_type enable_thinking tokenizer_type use_galore fp8 overlong_filter "
    "special_tokens mask_truncated_completions new_special_tokens rope_scaling moe_aux_loss_coeff "
    "moe_z_loss_coeff use_chat_template external_plugins"
)
# Not to use these changes what is learnt.
_MEANT = ("use_chat_template", "train_on_eos", "train_on_eot", "norm_bbox", "do_sample")
# Classes of names that no table has.
_CLASSES = {
    "what it sets is not read: set it by the keys of docs/configuration.md": re.compile(
        r"\w+_kwargs|response_prefix"
    ),
    "it says how that trainer runs, and not what is learnt": re.compile(
        r"(?:\w*_)?(?:kernels?|fused|fusion|liger|unsloth|compile|xformers|logs?|logging|print|tqdm"
        r"|profiler?|trace|prometheus|otel|debug|hub|caches?(?!_len)|caching|download|serialization"
        r"|shm|hdfs|symlink|workers?|num_proc|processes|timeout|nccl|host|port|ray|memory|gc|p2p"
        r"|watchdog|recompute)(?!_?prob)(?:_\w+)?"
    ),
}


@dataclass
class Leftovers:
    """Settings without a counterpart, by the sentence about them."""

    sentences: dict[str, list[Setting]] = field(default_factory=dict)
    off: list[Setting] = field(default_factory=list)  # not used there either
    unknown: list[Setting] = field(default_factory=list)

    def add(self, sentence: str, setting: Setting) -> None:
        """Add a setting to those of a sentence."""
        self.sentences.setdefault(sentence, []).append(setting)


def read_leftovers(t: Translation, ignored: frozenset[str], errors: list[ConfigError]) -> Leftovers:
    """Translate the settings that mean the same here, and return the others. A name that is not
    known is an error, unless it is ignored or nobody has written it."""
    left = Leftovers()
    for key, name in t.trainer.same.items():
        t.copy(key, name)
    for name, setting in t.source.settings.items():
        if name not in t.read and name not in ignored:
            _sort(t, left, setting)
    if left.unknown and not t.source.is_dump:
        problem = f"is no key of {t.trainer.title} that is known here"
        names = ",".join(setting.name for setting in left.unknown)
        remedy = f"remove what is not needed, or give --ignore {names}"
        *others, last = left.unknown
        errors += [t.source.error(setting, problem) for setting in others]
        errors.append(t.source.error(last, problem, remedy=remedy))
    return left


def _sort(t: Translation, left: Leftovers, setting: Setting) -> None:
    found = find_counterpart(setting.name)
    if found in leaves():
        _copy(t, left, str(found), setting)
    elif is_off(setting.value) and setting.name.rpartition(".")[2] not in _MEANT:
        left.off.append(setting)
    elif found is not None and setting.name.rpartition(".")[2] in _CHANGES.split():
        t.differ(found, setting)
    elif found is not None:
        left.add(found, setting)
    else:
        left.unknown.append(setting)


def find_counterpart(name: str) -> str | None:
    """Return our key or a sentence. Settings of Megatron-LM that verl passes on have their own."""
    last = name.rpartition(".")[2]
    own = counterpart_of(last) if ".override_" in name else None
    its_class = next((text for text, form in _CLASSES.items() if form.fullmatch(last)), None)
    return own or counterpart_of(name) or _OWN_NAMES.get(name) or its_class


def _copy(t: Translation, left: Leftovers, key: str, setting: Setting) -> None:
    is_switch = key_types()[key] is bool
    if is_nothing(setting.value) or (is_off(setting.value) and not is_switch):
        left.off.append(setting)
    elif key in t.lines:
        left.add(f"{key} is set already, by another key of the configuration", setting)
    else:
        t.copy_setting(key, setting)
