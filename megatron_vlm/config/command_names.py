"""Answers to commands that do not exist: those of other programs, and near misses."""

import difflib
from collections.abc import Sequence

from megatron_vlm.errors import ConfigError, show_value

_SUPERVISED = "did you mean train?"
_REWARDS = "did you mean rl?"
_SCORES = "did you mean eval?"
_CHATS = "did you mean chat?"
_CHECKS = "did you mean doctor?"
_PREFERENCES = "did you mean train? It learns from preferences with train.objective=dpo"
_DISTILLATION = (
    "did you mean train? It learns from the scores of a teacher with train.objective=distill, and "
    "megatron-vlm score writes them"
)
_TEACHERS = (
    "did you mean rl? It learns from a teacher with rl=distill, and train does from stored scores "
    "with train.objective=distill"
)
_EMBEDDINGS = "did you mean train? It learns them with train.objective=embed or rerank"
_NO_REWARD_MODEL = (
    "no reward model is trained; train.objective=dpo learns from preferences directly"
)
_SERVERS = (
    "vLLM serves the folder that `megatron-vlm export` writes (docs/deploy.md); "
    "`megatron-vlm serve` is a training service for the Tinker client"
)
# Commands of TRL, ms-swift, LLaMA-Factory, axolotl, vLLM and other programs.
_OTHER_COMMANDS = {
    _SUPERVISED: "sft pt pretrain finetune fine-tune fine_tune fit run launch lora",
    _REWARDS: "grpo ppo rlhf gspo dapo rloo reinforce",
    _PREFERENCES: "dpo ipo kto orpo simpo cpo bco",
    _DISTILLATION: "gkd distill distillation kd",
    "did you mean score? It writes log-probs and perplexities": "perplexity ppl logprobs logits",
    _NO_REWARD_MODEL: "rm reward",
    _TEACHERS: "gkd distill distillation opd",
    _EMBEDDINGS: "embed embedding embeddings rerank reranker",
    _SCORES: "evaluate evaluation test benchmark validate",
    "did you mean eval? Its option --predictions FILE writes the answers": "predict",
    _CHATS: "infer inference generate webchat webui web-ui app ask",
    "did you mean export? With --as merged it merges adapters into the model": (
        "merge merge-lora merge_lora merge-sharded-fsdp-weights convert save"
    ),
    "did you mean push? It uploads an export": "upload push-to-hub",
    _SERVERS: "deploy api vllm-serve vllm rollout start-server",
    "did you mean inspect? It prints what the model will see of a data set": (
        "preprocess data dataset show view tokenize preview"
    ),
    "did you mean plan? `train --dry-run` checks one layout": "estimate memory fit-memory layout",
    _CHECKS: "env check info diagnose status",
    "did you mean report? It writes the page of a run": "plot tensorboard compare page",
    "write megatron-vlm serve --add-client NAME FILE": "serve-key",
    "write megatron-vlm demo shapes": "shapes",
    "write megatron-vlm demo tiny": "tiny",
    "did you mean --version?": "version",
    "did you mean --help?": "help",
}
_HINTS = {name: hint for hint, names in _OTHER_COMMANDS.items() for name in names.split()}


def check_command(words: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a command that does not exist, with the one that was most likely meant."""
    if words and not words[0].startswith("-") and words[0] not in known:
        remedy = command_hint(words[0], known)
        raise ConfigError("is not a command", key=show_value(words[0]), remedy=remedy)


def command_hint(word: str, known: Sequence[str]) -> str:
    """Return the remedy for "WORD is not a command"."""
    if hint := _HINTS.get(word.lower()):
        return hint
    if "=" in word:
        return f"did you mean `megatron-vlm train {word}`?"
    if near := difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6):
        return f"did you mean {near[0]}?"
    return f"the commands are {', '.join(known)}"
