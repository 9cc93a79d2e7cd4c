"""Model card of an export, README.md: the base model, the training and the scores.

It follows from the checkpoint and the base model alone. Files of this machine appear by their
names, and all names from outside as code, which neither YAML nor Markdown interprets."""

import fnmatch
import importlib.metadata
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megatron_vlm.config.data_sources import HUB
from megatron_vlm.config.lora_base_types import BASE_TITLES, WEIGHTS_PER_BLOCK
from megatron_vlm.config.optimizer_spec import optimizer_spec
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import SWITCHES, learns
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.checkpoint_files import is_regular_file
from megatron_vlm.hf.export_mark import CARD
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.retrieval_files import RERANK_TEMPLATE
from megatron_vlm.io.hub import hub_name
from megatron_vlm.io.printable import escape_controls, number
from megatron_vlm.io.untrusted import UntrustedFile
from megatron_vlm.version import __version__

_HEAD = re.compile(r"\s*---[^\n]*\n(.*?)\n---", re.DOTALL)
_DATA = re.compile(rf"{HUB}\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)  # a data set of the Hub
_READ = 2**16  # bytes of a base's card to read; the card begins with its YAML
_LICENSE = ("license", "license_name", "license_link")
_SHOWN = 40  # maximum number of added tokens to list
_LONGEST = 300  # maximum characters of a licence's name or address
_BENEATH = ("megatron-core", "torch", "transformers")
_SEARCH = {"embed": "sentence-similarity", "rerank": "text-ranking"}
_TASKS = _SEARCH | {"reward": "text-classification"}
_NAMES = {"vision": "vision tower", "merger": "mergers", "language": "decoder"}
_EMBED = """
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")
queries = model.encode_query(["a red circle"])
documents = model.encode_document([{"image": "circle.png"}, "a blue square"])
print(model.similarity(queries, documents))
```

With vLLM: `vllm serve FOLDER --runner pooling`, and a chat to `/v1/embeddings` that has this system
message and one message of a user, with `"add_generation_prompt": true`"""
_RERANK = """
```python
from sentence_transformers import CrossEncoder

model = CrossEncoder("FOLDER")
pairs = [("a red circle", {"image": "circle.png"}), ("a red circle", "a blue square")]
print(model.predict(pairs))
```

With vLLM, whose `/rerank` and `/score` give the same:

```bash
"""


@dataclass(frozen=True)
class TrainingSummary:
    """Training of the base model, from a checkpoint's config.yaml and state.json."""

    cfg: Config
    step: int
    tokens: int | None = None  # trained tokens; None where an older version did not count them
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by held-out set
    scored_step: int | None = None


def model_card(
    source: HFCheckpoint, done: TrainingSummary | None = None, is_adapter: bool = False
) -> str:
    """Return the text of README.md, for a model or for an adapter alone."""
    base = done.cfg.model.path if done else source.name
    head = yaml.safe_dump(_head(source, base, done, is_adapter), allow_unicode=False, width=10**6)
    copied = () if is_adapter else source.family.passthrough
    patterns = [each for each in copied if fnmatch.filter(source.passthrough, each)]
    use = [] if done is None or is_adapter else list(retrieval_usage(done.cfg))
    return f"---\n{head}---\n\n" + "\n".join(_body(base, done, patterns, use)) + "\n"


def _head(
    source: HFCheckpoint, base: str, done: TrainingSummary | None, is_adapter: bool
) -> dict[str, Any]:
    objective = done.cfg.train.objective if done else "sft"
    library = "sentence-transformers" if objective in _SEARCH else "transformers"
    fields: dict[str, Any] = {
        "library_name": "peft" if is_adapter else library,
        "pipeline_tag": _TASKS.get(objective, "image-text-to-text"),
        "tags": ["megatron_vlm"],
        **_license_of(source.path / CARD),
    }
    if (name := hub_name(base)) is not None:
        relation = "adapter" if is_adapter else "finetune"
        fields |= {"base_model": name.repo, "base_model_relation": relation}
    sources = done.cfg.data.train if done else ()
    if datasets := [spec.path.removeprefix(HUB) for spec in sources if _DATA.fullmatch(spec.path)]:
        fields["datasets"] = datasets
    return fields


def _license_of(card: Path) -> dict[str, str]:
    if not card.is_file() or not is_regular_file(card):
        return {}
    file = UntrustedFile(str(card), CheckpointError, "remove it, or download it again")
    head = _HEAD.match(file.read_beginning(_READ).decode("utf-8-sig", "replace"))
    try:
        fields = yaml.safe_load(head[1]) if head else None
    except (yaml.YAMLError, ValueError, RecursionError):
        fields = None
    values = {key: fields.get(key) for key in _LICENSE} if isinstance(fields, dict) else {}
    return {
        key: _line(value)
        for key, value in values.items()
        if isinstance(value, str) and len(value) <= _LONGEST
    }


def _body(
    base: str, done: TrainingSummary | None, copied: Sequence[str], use: Sequence[str]
) -> Iterator[str]:
    name = hub_name(base)
    shown = code(name.repo if name else Path(base).name)
    commit = f" at commit {code(name.commit)}" if name and name.commit else ""
    yield f"# {shown}, fine-tuned"
    yield ""
    length = ""
    if done is not None:
        tokens = "" if done.tokens is None else f" and {done.tokens:,} trained tokens"
        length = f", for {done.step:,} steps{tokens}"
    yield f"Fine-tuned from {shown}{commit} with megatron_vlm{length}."
    for pattern in copied:
        yield ""
        yield (
            f"The {code(pattern)} tensors are those of the base model: they were not trained with "
            "it, so drafts may be accepted less often."
        )
    if done is not None:
        yield from use
        yield from _data(done)
        yield from _scores(done)
        yield from _settings(done.cfg)
    yield from ("", "## Versions", "")
    yield from (f"- {name} {version}" for name, version in versions().items())


def versions() -> dict[str, str]:
    """Return the version of this package, which may run from a checkout without installation, and
    the versions of the packages that it is built on."""
    dependencies = {name: importlib.metadata.version(name) for name in _BENEATH}
    return {"megatron_vlm": __version__, **dependencies}


def _data(done: TrainingSummary) -> Iterator[str]:
    yield from ("", "## Data", "")
    for spec in done.cfg.data.train:
        weight = "" if spec.weight == 1 else f", weight {spec.weight:g}"
        is_of_hub = spec.path.startswith(HUB)
        name = spec.path.removeprefix(HUB) if is_of_hub else Path(spec.path).name
        yield f"- {code(name)}{weight}"


def _scores(done: TrainingSummary) -> Iterator[str]:
    finite = {
        name: {key: value for key, value in scores.items() if math.isfinite(value)}
        for name, scores in done.scores.items()
    }
    if not any(finite.values()):
        return
    yield from ("", "## Scores", "", f"On held-out data, after {done.scored_step:,} steps:", "")
    for name, scores in finite.items():
        figures = ", ".join(
            f"{key.replace('_', ' ')} {number(value)}" for key, value in scores.items()
        )
        yield f"- {code(name)}: {figures}"


def _settings(cfg: Config) -> Iterator[str]:
    optim, train = cfg.optim, cfg.train
    yield from ("", "## Training", "")
    yield f"- {train.global_batch_size:,} samples a step, of at most {cfg.data.max_tokens:,} tokens"
    warmup = f"{optim.warmup_steps:,} steps of warm-up"
    if optim.warmup_ratio and not optim.warmup_steps:
        warmup = f"warm-up in the first {100 * optim.warmup_ratio:g}% of them"
    rate = f"{optim.lr:g}" if optim.muon_lr is None else f"{optim.lr:g}, Muon's {optim.muon_lr:g}"
    yield (
        f"- {optimizer_spec(optim).title}: learning rate {rate}, {optim.schedule}, {warmup}, "
        f"weight decay {optim.weight_decay:g}, gradients clipped at {optim.clip_grad:g}"
    )
    chosen = cfg.data.train_on
    yield f"- trained: {code(chosen if isinstance(chosen, str) else ', '.join(chosen))}"
    if new := cfg.data.add_tokens:
        more = f" and {len(new) - _SHOWN:,} more" if len(new) > _SHOWN else ""
        yield f"- added to the vocabulary: {', '.join(map(code, new[:_SHOWN]))}{more}"
    if cfg.lora.rank:
        targets = ", ".join(map(code, cfg.lora.targets))
        yield f"- LoRA of rank {cfg.lora.rank}, alpha {cfg.lora.alpha:g}, in {targets}"
    if cfg.lora.base is not None:
        yield (
            f"- beside linear layers in {BASE_TITLES[cfg.lora.base]}, blocks of "
            f"{WEIGHTS_PER_BLOCK} weights with a scale each; a merged model has these values"
        )
    if frozen := [part for part in SWITCHES if not learns(cfg, part)]:
        remark = " but for adapters" if cfg.lora.rank else ""
        yield f"- frozen{remark}: {', '.join(_NAMES[part] for part in frozen)}"


def _line(text: str) -> str:
    """Return the text in one line: the beginning of a line could end the YAML of the card."""
    return " ".join(escape_controls(text).split())


def code(text: str) -> str:
    """Return the text as code in one line of Markdown, for any characters in it."""
    text = _line(text) or " "
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def retrieval_usage(cfg: Config) -> Iterator[str]:
    """Yield the lines of the section; none for other objectives."""
    if cfg.train.objective == "embed":
        yield from ("", "## Use", "")
        yield "The embedding is the normalised hidden state of the last token. The instruction is"
        yield f"`{json.dumps(cfg.embed.instruction, ensure_ascii=False)}`."
        kwargs = json.dumps(cfg.data.template_kwargs)
        more = f' and `"chat_template_kwargs": {kwargs}`' if cfg.data.template_kwargs else ""
        yield f"{_EMBED}{more}."
        if sizes := cfg.embed.dimensions:
            listing = ", ".join(map(str, sizes))
            yield from ("", f"Embeddings may be cut to their first {listing} values.")
    elif cfg.train.objective == "rerank":
        yes, no = cfg.rerank.positive_token, cfg.rerank.negative_token
        yield from ("", "## Use", "")
        yield f"The score of a document is the logit of `{yes}` minus that of `{no}` after the"
        yield f"prompt that `{RERANK_TEMPLATE}` makes, as a probability. The instruction is"
        yield f"`{json.dumps(cfg.rerank.instruction, ensure_ascii=False)}`."
        yield _RERANK.rstrip()
        yield "vllm serve FOLDER --runner pooling --convert classify \\"
        yield f"    --chat-template FOLDER/{RERANK_TEMPLATE} \\"
        yield f"    --hf-overrides {shlex.quote(json.dumps(vllm_overrides(cfg)))}"
        yield "```"


def vllm_overrides(cfg: Config) -> dict[str, object]:
    """Return the values of config.json with which vLLM makes a classifier of a reranker."""
    tokens = [cfg.rerank.negative_token, cfg.rerank.positive_token]
    return {"classifier_from_token": tokens, "method": "from_2_way_softmax"}
