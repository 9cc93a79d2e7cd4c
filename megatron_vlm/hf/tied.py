"""config.json of a model whose head no longer shares the embedding's weight."""

import json
from pathlib import Path
from typing import Any

_TIED = "tie_word_embeddings"


def untie(folder: Path) -> None:
    """Say so in a copy of the checkpoint: at the top, which transformers reads, and among the
    fields of the text where they repeat it."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    config[_TIED] = False
    if _TIED in config["text_config"]:
        config["text_config"][_TIED] = False
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    file.write_text(text, encoding="utf-8")
