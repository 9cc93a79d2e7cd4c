"""Files by which sentence-transformers and vLLM know an export as a model of embeddings: the last
token's hidden state, normalised, of a chat with the instruction as its system message."""

import json
from pathlib import Path

from megatron_vlm.config.schema import Config

_MODULES = "sentence_transformers.models"
_POOLING = "1_Pooling"


def write_embedding_files(folder: Path, cfg: Config, hidden: int) -> None:
    """Write the files into the folder of an export."""
    parts = (("", "Transformer"), (_POOLING, "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_MODULES}.{kind}"}
        for number, (path, kind) in enumerate(parts)
    ]
    instruction = cfg.embed.instruction
    prompts = {"query": instruction, "document": instruction} if instruction else {}
    settings = {
        "model_type": "SentenceTransformer",
        "prompts": prompts,
        "default_prompt_name": "document" if prompts else None,
        "similarity_fn_name": "cosine",
    }
    # Without these, sentence-transformers takes the model for one of bare texts.
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = dict.fromkeys(("text", "image", "video"), forward)
    transformer = {
        "transformer_task": "feature-extraction",
        "modality_config": modalities | {"message": forward | {"format": "structured"}},
        "module_output_name": "token_embeddings",
        "max_seq_length": cfg.data.max_tokens,
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    pooling = {
        "word_embedding_dimension": hidden,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_weightedmean_tokens": False,
        "pooling_mode_lasttoken": True,
        "include_prompt": True,
    }
    (folder / _POOLING).mkdir()
    for name, content in (
        ("modules.json", modules),
        ("config_sentence_transformers.json", settings),
        ("sentence_bert_config.json", transformer),
        (f"{_POOLING}/config.json", pooling),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
