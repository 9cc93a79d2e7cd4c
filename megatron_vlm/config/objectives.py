"""Objectives of `megatron-vlm train`: the records that each one reads, the losses that it offers,
and checks of their keys. The losses themselves are in training/row_losses.py."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from megatron_vlm.config import objective_configs
from megatron_vlm.config.schema import Config, check_of, get
from megatron_vlm.config.teachers import stream_errors
from megatron_vlm.errors import ConfigError


def _retrieval_errors(cfg: Config) -> Iterator[ConfigError]:
    """Refuse settings that contradict train.objective=embed or rerank."""
    name = cfg.train.objective
    if cfg.data.system is not None:
        yield ConfigError(
            f": train.objective={name} has a system message of its own",
            key="data.system",
            remedy=f"set {name}.instruction",
        )
    ks = cfg.eval.recall_at
    if not ks or len(set(ks)) < len(ks) or any(type(k) is not int for k in ks):
        yield ConfigError(
            key="eval.recall_at", allowed="whole numbers, each once, such as [1,5,10]"
        )
    yield from _answer_errors(cfg, "recall and nDCG")
    if name == "embed":
        yield from _embed_errors(cfg)
    elif cfg.rerank.positive_token == cfg.rerank.negative_token:
        yield ConfigError("is rerank.positive_token, too", key="rerank.negative_token")
    is_list = name == "rerank" and cfg.rerank.loss == "listwise"
    if is_list and cfg.rerank.hard_negatives == 0:
        yield ConfigError(
            ": rerank.loss=listwise compares a positive with negatives",
            key="rerank.hard_negatives",
            allowed="1 or more, or null",
        )


def _answer_errors(cfg: Config, measured: str) -> Iterator[ConfigError]:
    """Refuse cut rows and generated answers where a model only reads the last token of a row."""
    name = cfg.train.objective
    if cfg.data.truncation == "image_safe":
        yield ConfigError(
            f": train.objective={name} reads the last token of a row, which a cut would remove",
            key="data.truncation",
            allowed=("error", "drop"),
        )
    for key in ("eval.generate", "eval.metrics", "eval.candidates"):
        if get(cfg, key):
            yield ConfigError(
                f": with train.objective={name} the model writes no answers",
                key=key,
                remedy=f"leave it out; {measured} are always measured",
            )


def _embed_errors(cfg: Config) -> Iterator[ConfigError]:
    dimensions = cfg.embed.dimensions
    if any(type(size) is not int for size in dimensions):
        yield ConfigError(key="embed.dimensions", allowed="whole numbers, such as [1024,256,64]")
    if len(set(dimensions)) < len(dimensions):
        yield ConfigError("has a size twice", key="embed.dimensions")
    check_weights_of_terms(cfg, "embed.dimension_weights", "embed.dimensions", "size")
    if cfg.lora.dropout:
        yield ConfigError(
            ": the gradient of train.objective=embed is taken at embeddings of a forward pass "
            "without dropout",
            key="lora.dropout",
            allowed=0,
        )


def check_weights_of_terms(cfg: Config, key: str, terms_key: str, term: str) -> None:
    """Refuse weights of the terms of a loss that are no weights, or do not belong to the terms."""
    weights, terms = get(cfg, key), get(cfg, terms_key)
    for number, weight in enumerate(weights):
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            allowed = "a finite number, 0 or more"
            raise ConfigError(key=f"{key}[{number}]", found=weight, allowed=allowed)
    if weights and len(weights) != len(terms):
        raise ConfigError(
            f"has {len(weights)} entries, and {terms_key} has {len(terms)}",
            key=key,
            remedy=f"give one for each {term}",
        )
    if weights and not any(weights):
        raise ConfigError(f"is 0 for each {term}", key=key)


def check_embedding_size(cfg: Config, hidden: int) -> None:
    """Refuse sizes of embeddings above that of the model's hidden states."""
    largest = max(cfg.embed.dimensions, default=0)
    if cfg.train.objective == "embed" and largest > hidden:
        raise ConfigError(
            f"has a size above {hidden}, that of the model's hidden states",
            key="embed.dimensions",
            found=list(cfg.embed.dimensions),
            allowed=range(1, hidden + 1),
        )


@dataclass(frozen=True)
class ObjectiveSpec:
    """Properties of an objective that are known without a model."""

    records: objective_configs.RecordName
    losses: tuple[str, ...] = ()  # the first one is the default
    has_reference: bool = False
    sft_coef: float = 0.0  # default of preference.sft_coef


_PAIR_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
) + ("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")
OBJECTIVES: dict[objective_configs.ObjectiveName, ObjectiveSpec] = {
    "sft": ObjectiveSpec("chat"),
    "dpo": ObjectiveSpec("pair", _PAIR_LOSSES, has_reference=True),
    "ipo": ObjectiveSpec("pair", ("ipo",), has_reference=True),
    "kto": ObjectiveSpec("label", ("kto", "apo_zero_unpaired"), has_reference=True),
    "orpo": ObjectiveSpec("pair", ("orpo",), sft_coef=1.0),
    "simpo": ObjectiveSpec("pair", ("simpo",)),
    "cpo": ObjectiveSpec("pair", ("cpo", "hinge", "ipo"), sft_coef=1.0),
    "reward": ObjectiveSpec("rated_pair"),
    "distill": ObjectiveSpec("chat"),
    "embed": ObjectiveSpec("query"),
    "rerank": ObjectiveSpec("query"),
}
# The loss of an example depends on the whole global batch.
BATCH_LOSSES = frozenset({"aot", "aot_unpaired"})
SMOOTHED = frozenset({"exo_pair", "robust", "aot", "aot_unpaired", "simpo", "cpo"})
_REWARDED = ("grpo", "ppo", "gspo", "dapo", "rloo", "reinforce", "cispo", "dr_grpo")


def spec_of(cfg: Config) -> ObjectiveSpec:
    """Return the properties of the configured objective."""
    return OBJECTIVES[cfg.train.objective]


def records_of(cfg: Config) -> objective_configs.RecordKind:
    """Return the kind of the records, and for queries with documents their form."""
    if (records := spec_of(cfg).records) != "query":
        return records
    if cfg.train.objective == "embed":
        return objective_configs.RetrievalForm(cfg.embed.instruction, cfg.embed.hard_negatives)
    rerank = cfg.rerank
    tokens = (rerank.positive_token, rerank.negative_token)
    is_list = rerank.loss == "listwise"
    return objective_configs.RetrievalForm(
        rerank.instruction, rerank.hard_negatives, tokens, is_list
    )


def losses_of(cfg: Config) -> dict[str, float]:
    """Return the losses of the objective, each with its weight."""
    losses = cfg.preference.losses or spec_of(cfg).losses[:1]
    weights = cfg.preference.loss_weights or (1.0,) * len(losses)
    return dict(zip(losses, weights, strict=True))


def reference_of(cfg: Config) -> objective_configs.Reference | None:
    """Return where the log-probs of the reference are from, or None if none are needed."""
    if not spec_of(cfg).has_reference:
        return None
    for source in get_args(objective_configs.Reference):
        if source == cfg.preference.reference:
            return source
    if reference_folder(cfg) is not None:
        return "keep"
    if trains_adapters_alone(cfg):
        return "adapters_off"
    # The answers that kto compares with change with each batch.
    return "model" if cfg.data.is_stream or needs_mismatched(cfg) else "keep"


def trains_adapters_alone(cfg: Config) -> bool:
    """Return whether the model without its adapters is the initial one."""
    return bool(cfg.lora.rank) and not cfg.lora.train and cfg.lora.path is None


def reference_folder(cfg: Config) -> str | None:
    """Return the folder with the scores of the reference; None if it is the initial model."""
    value = cfg.preference.reference
    return None if value in ("auto", *get_args(objective_configs.Reference)) else value


def needs_mismatched(cfg: Config) -> bool:
    """Return whether the loss reads log-probs of answers to other prompts."""
    return cfg.train.objective == "kto" and "kto" in losses_of(cfg)


@check_of
def check_objective(cfg: Config) -> Iterator[ConfigError]:
    """Refuse settings of objectives that contradict each other."""
    spec, preference, name = spec_of(cfg), cfg.preference, cfg.train.objective
    unknown = [loss for loss in preference.losses if loss not in spec.losses]
    if unknown:
        others = [other for other, each in OBJECTIVES.items() if unknown[0] in each.losses]
        raise ConfigError(
            f"is not a loss of train.objective={name}",
            key="preference.losses",
            found=unknown[0],
            allowed=spec.losses or ("none",),
            remedy=f"train.objective={others[0]} has it" if others else "",
        )
    if len(set(preference.losses)) < len(preference.losses):
        raise ConfigError(
            "has a loss twice", key="preference.losses", found=list(preference.losses)
        )
    check_weights_of_terms(cfg, "preference.loss_weights", "preference.losses", "loss")
    if cfg.distill.beta != 0.5 and cfg.distill.divergence != "jsd":
        yield ConfigError(
            f"has no effect with distill.divergence={cfg.distill.divergence}",
            key="distill.beta",
            remedy="give distill.divergence=jsd",
        )
    folder = reference_folder(cfg)
    if folder is not None and not spec.has_reference:
        names = [each for each, objective in OBJECTIVES.items() if objective.has_reference]
        yield ConfigError(
            f"has no effect with train.objective={name}",
            key="preference.reference",
            remedy=f"give train.objective={' or '.join(names)}",
        )
    if spec.records == "chat":
        return
    if spec.records == "query":
        yield from _retrieval_errors(cfg)
        return
    if cfg.data.train_on not in ("all_assistant", "last_assistant"):
        yield ConfigError(
            f": train.objective={name} compares the answers of the assistant",
            key="data.train_on",
            allowed=("all_assistant", "last_assistant"),
        )
    if spec.records == "rated_pair":
        yield from _answer_errors(cfg, "loss and accuracy")
    yield from _smoothing_errors(cfg)
    yield from _reference_errors(cfg)


def _smoothing_errors(cfg: Config) -> Iterator[ConfigError]:
    smoothing, losses = cfg.preference.label_smoothing, losses_of(cfg)
    uses = SMOOTHED & set(losses)
    if smoothing and not uses:
        yield ConfigError(
            f"has no effect on {', '.join(losses)}",
            key="preference.label_smoothing",
            remedy=f"choose one of {', '.join(sorted(SMOOTHED))}; robust is sigmoid with it",
        )
    if "exo_pair" in losses and not smoothing:
        yield ConfigError(
            ": exo_pair takes its logarithm",
            key="preference.label_smoothing",
            allowed="more than 0, such as 0.001",
        )
    if "robust" in losses and smoothing >= 0.5:
        yield ConfigError(
            ": robust divides by 1 - 2 x label_smoothing",
            key="preference.label_smoothing",
            allowed="less than 0.5",
        )


def _reference_errors(cfg: Config) -> Iterator[ConfigError]:
    reference = reference_of(cfg)
    if reference_folder(cfg) is not None:
        yield from stream_errors(cfg, "preference.reference")
    if reference == "adapters_off":
        yield from _adapter_errors(cfg)
    if reference == "keep" and cfg.data.is_stream:
        yield ConfigError(
            ": data.train is a stream, whose samples are not known before the first step",
            key="preference.reference",
            remedy="give preference.reference=adapters_off or model",
        )
    if reference == "keep" and needs_mismatched(cfg):
        yield ConfigError(
            ": kto compares each answer with those to other prompts of its batch, which are not "
            "known before the first step",
            key="preference.reference",
            remedy="give preference.reference=adapters_off or model, or choose "
            "preference.losses=[apo_zero_unpaired], which compares with none",
        )
    compared = sorted(BATCH_LOSSES & set(losses_of(cfg)))
    if cfg.lora.dropout and compared:
        yield ConfigError(
            f": the gradient of {', '.join(compared)} is taken at log-probs of a forward pass "
            "without dropout",
            key="lora.dropout",
            allowed=0,
        )


def _adapter_errors(cfg: Config) -> Iterator[ConfigError]:
    why = ""
    if not cfg.lora.rank:
        why = "there are no adapters"
    elif cfg.lora.train:
        why = f"lora.train={list(cfg.lora.train)} trains other weights, too"
    elif cfg.lora.path is not None:
        why = "lora.path continues an adapter, so the model without it is not the initial one"
    if why:
        yield ConfigError(f": {why}", key="preference.reference", allowed=("keep", "model"))


@check_of
def check_rewarded(cfg: Config) -> Iterator[ConfigError]:
    """Refuse a method that learns from rewards, which another command has."""
    if cfg.train.objective in _REWARDED:
        yield ConfigError(
            "learns from rewards, which is another command",
            key="train.objective",
            remedy="write megatron-vlm rl with a recipe such as rl=grpo",
        )
