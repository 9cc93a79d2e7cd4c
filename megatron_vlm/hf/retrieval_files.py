"""Files by which sentence-transformers and vLLM know an export as a model that searches.

An embedding is the last token's normalised hidden state, of a chat with the instruction as its
system message. A reranker's score is the logit of yes minus that of no after reranker.jinja."""

import json
from pathlib import Path
from typing import Any

from megatron_vlm.config.objective_configs import JUDGE, PAIR_MARKS
from megatron_vlm.config.schema import Config
from megatron_vlm.data.tokens.tokenizer import read_tokenizer

RERANK_TEMPLATE = "reranker.jinja"
_MODULES = "sentence_transformers.models"
_LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
_POOLING, _SCORE = "1_Pooling", "1_LogitScore"


def write_retrieval_files(folder: Path, cfg: Config, hidden: int) -> None:
    """Write the files into the folder of an export, which has its tokenizer already."""
    if cfg.train.objective == "embed":
        files = _embedding_files(cfg, hidden)
    elif cfg.train.objective == "rerank":
        files = _reranker_files(folder, cfg)
    else:
        return
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        path.write_text(text, encoding="utf-8")


def _embedding_files(cfg: Config, hidden: int) -> dict[str, Any]:
    instruction = cfg.embed.instruction
    prompts = {"query": instruction, "document": instruction} if instruction else {}
    return {
        "modules.json": _modules(
            ("", f"{_MODULES}.Transformer"),
            (_POOLING, f"{_MODULES}.Pooling"),
            ("2_Normalize", f"{_MODULES}.Normalize"),
        ),
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": prompts,
            "default_prompt_name": "document" if prompts else None,
            "similarity_fn_name": "cosine",
        },
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": _modalities("last_hidden_state"),
            "module_output_name": "token_embeddings",
            "max_seq_length": cfg.data.max_tokens,
            "processing_kwargs": {"chat_template": _chat_variables(cfg)},
        },
        f"{_POOLING}/config.json": {
            "word_embedding_dimension": hidden,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": False,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
            "pooling_mode_weightedmean_tokens": False,
            "pooling_mode_lasttoken": True,
            "include_prompt": True,
        },
    }


def _reranker_files(folder: Path, cfg: Config) -> dict[str, Any]:
    tokenizer = read_tokenizer(str(folder))
    vocab = tokenizer.get_vocab()
    template = rerank_template(str(tokenizer.chat_template), cfg)
    return {
        RERANK_TEMPLATE: template,
        "modules.json": _modules(("", f"{_MODULES}.Transformer"), (_SCORE, _LOGIT_SCORE)),
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "prompts": {},
            "default_prompt_name": None,
            "activation_fn": "torch.nn.modules.activation.Sigmoid",
        },
        "sentence_bert_config.json": {
            "transformer_task": "any-to-any",
            "modality_config": _modalities("logits"),
            "module_output_name": "causal_logits",
            "max_seq_length": cfg.data.max_tokens,
            "processing_kwargs": {"chat_template": {"chat_template": template}},
        },
        f"{_SCORE}/config.json": {
            "true_token_id": vocab[cfg.rerank.positive_token],
            "false_token_id": vocab[cfg.rerank.negative_token],
            "module_input_name": "causal_logits",
        },
    }


def rerank_template(chat_template: str, cfg: Config) -> str:
    """Return a template that makes a reranker's prompt of a message of role query and one of role
    document. It turns them into the messages that a row of training has, and leaves these to the
    chat template, so that the prompt is the same."""
    variables = {
        "instruction": cfg.rerank.instruction,
        "judge": JUDGE,
        "marks": list(PAIR_MARKS),
        **_chat_variables(cfg),
    }
    settings = [f"{{%- set {name} = {value!r} -%}}" for name, value in variables.items()]
    head = Path(__file__).with_name(RERANK_TEMPLATE).read_text(encoding="utf-8")
    return "\n".join((*settings, head + chat_template))


def _chat_variables(cfg: Config) -> dict[str, Any]:
    return {**cfg.data.template_kwargs, "add_generation_prompt": True}


def _modules(*parts: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(parts)
    ]


def _modalities(output: str) -> dict[str, Any]:
    """Return the kinds of input, without which sentence-transformers would take bare texts."""
    forward = {"method": "forward", "method_output_name": output}
    modalities = dict.fromkeys(("text", "image", "video"), forward)
    return modalities | {"message": forward | {"format": "structured"}}
