"""Section of a model card that says how embeddings and rerankers are used."""

import json
import shlex
from collections.abc import Iterator

from megatron_vlm.config.schema import Config
from megatron_vlm.hf.retrieval_files import RERANK_TEMPLATE

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
