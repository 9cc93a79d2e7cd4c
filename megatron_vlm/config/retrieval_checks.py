"""Checks of the keys of embeddings and rerankers."""

import math

from megatron_vlm.config.schema import Config, get
from megatron_vlm.errors import ConfigError


def check_retrieval(cfg: Config) -> None:
    """Refuse settings that contradict train.objective=embed or rerank."""
    name = cfg.train.objective
    if cfg.data.system is not None:
        raise ConfigError(
            f": train.objective={name} has a system message of its own",
            key="data.system",
            found=cfg.data.system,
            remedy=f"set {name}.instruction",
        )
    if cfg.data.truncation == "image_safe":
        raise ConfigError(
            f": train.objective={name} reads the last token of a row, which a cut would remove",
            key="data.truncation",
            found=cfg.data.truncation,
            allowed=("error", "drop"),
        )
    ks = cfg.eval.recall_at
    if not ks or len(set(ks)) < len(ks) or any(type(k) is not int for k in ks):
        raise ConfigError(
            key="eval.recall_at",
            found=list(ks),
            allowed="whole numbers, each once, such as [1,5,10]",
        )
    _check_no_answers(cfg)
    if name == "embed":
        _check_embed(cfg)
    elif cfg.rerank.positive_token == cfg.rerank.negative_token:
        raise ConfigError(
            "is rerank.positive_token, too",
            key="rerank.negative_token",
            found=cfg.rerank.negative_token,
        )
    is_list = name == "rerank" and cfg.rerank.loss == "listwise"
    if is_list and cfg.rerank.hard_negatives == 0:
        raise ConfigError(
            ": rerank.loss=listwise compares a positive with negatives",
            key="rerank.hard_negatives",
            found=0,
            allowed="1 or more, or null",
        )


def _check_no_answers(cfg: Config) -> None:
    keys: dict[str, bool | str | tuple[str, ...] | None] = {
        "eval.generate": cfg.eval.generate,
        "eval.metrics": cfg.eval.metrics,
        "eval.candidates": cfg.eval.candidates,
    }
    for key, value in keys.items():
        if value:
            raise ConfigError(
                f": with train.objective={cfg.train.objective} the model writes no answers",
                key=key,
                found=list(value) if isinstance(value, tuple) else value,
                remedy="leave it out; recall and nDCG are always measured",
            )


def _check_embed(cfg: Config) -> None:
    dimensions = cfg.embed.dimensions
    if any(type(size) is not int for size in dimensions):
        raise ConfigError(
            key="embed.dimensions",
            found=list(dimensions),
            allowed="whole numbers, such as [1024,256,64]",
        )
    if len(set(dimensions)) < len(dimensions):
        raise ConfigError("has a size twice", key="embed.dimensions", found=list(dimensions))
    check_weights_of_terms(cfg, "embed.dimension_weights", "embed.dimensions", "size")
    if cfg.lora.dropout:
        raise ConfigError(
            ": the gradient of train.objective=embed is taken at embeddings of a forward pass "
            "without dropout",
            key="lora.dropout",
            found=cfg.lora.dropout,
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
