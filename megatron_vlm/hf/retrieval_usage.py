"""Section of a model card that says how embeddings and rerankers are used."""

import json
from collections.abc import Iterator

from megatron_vlm.config.schema import Config

_EMBED = """
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")
queries = model.encode_query(["a red circle"])
documents = model.encode_document([{"image": "circle.png"}, "a blue square"])
print(model.similarity(queries, documents))
```

With vLLM: `vllm serve FOLDER --runner pooling`, and a chat to `/v1/embeddings` that has this system
message and one message of a user, with `"add_generation_prompt": true`.
"""
_RERANK = """
A document is as relevant as the logit of {yes} after this prompt is above that of {no}:

```
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {instruction}<Query>:QUERY
<Document>:DOCUMENT<|im_end|>
<|im_start|>assistant
```
"""


def retrieval_usage(cfg: Config) -> Iterator[str]:
    """Yield the lines of the section; none for other objectives."""
    if cfg.train.objective == "embed":
        yield from ("", "## Use", "")
        yield "The embedding is the normalised hidden state of the last token. The instruction is "
        yield f"`{json.dumps(cfg.embed.instruction, ensure_ascii=False)}`."
        yield _EMBED.rstrip()
        if sizes := cfg.embed.dimensions:
            listing = ", ".join(map(str, sizes))
            yield from ("", f"Embeddings may be cut to their first {listing} values.")
    elif cfg.train.objective == "rerank":
        yield from ("", "## Use")
        words = {"yes": cfg.rerank.positive_token, "no": cfg.rerank.negative_token}
        shown = {name: f"`{word}`" for name, word in words.items()}
        yield _RERANK.format(instruction=cfg.rerank.instruction, **shown).rstrip()
