"""What a set is scored by: loss, token accuracy, exact match of answers, rank of candidates.

Shapes: N supervised tokens, V this rank's part of the padded vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batch.dataset import Handle
from megatron_vlm.data.batch.micro_batch import MicroBatch
from megatron_vlm.data.encode.chat import END
from megatron_vlm.data.encode.row import IGNORE, Row
from megatron_vlm.errors import DataError
from megatron_vlm.evaluation.sets import EvalSet, Question, ask, batches_of, questions_of
from megatron_vlm.model.log_probs import target_log_probs
from megatron_vlm.step.decode import generate, pick_ids, rank
from megatron_vlm.step.pipeline import broadcast_from_last, evaluating, run_schedule
from megatron_vlm.worker import MegatronWorker

BLOCK = 64  # questions that are in memory together


@dataclass(frozen=True)
class Answer:
    """What the model said to a question."""

    handle: Handle
    right: str
    said: str

    @property
    def is_right(self) -> bool:
        return self.right == self.said


def token_scores(
    worker: MegatronWorker, cfg: Config, held_out: EvalSet, alive: Callable[[], None]
) -> dict[str, float]:
    """Mean loss of the supervised tokens, and how many of them are the likeliest. A collective."""
    totals = torch.zeros(3, dtype=torch.float64, device=worker.platform.device)
    for batches in batches_of(worker, cfg, held_out):
        totals += _count_tokens(worker, batches)
        alive()
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    log_prob, right, count = totals.tolist()
    return {"loss": -log_prob / max(count, 1), "token_accuracy": right / max(count, 1)}


def exact_match(
    worker: MegatronWorker,
    cfg: Config,
    held_out: EvalSet,
    voice: "Voice",
    alive: Callable[[], None],
) -> tuple[float, list[Answer]]:
    """The part of the questions that the model answers word for word; this replica's answers."""

    def answer(questions: Sequence[Question]) -> list[str]:
        prompts = [voice.prompt(question) for question in questions]
        stop_ids = (voice.end_id,)
        said = generate(worker, prompts, cfg.eval.max_new_tokens, stop_ids, cfg.eval.batch_size)
        return [voice.text([*voice.prefill_ids, *ids]) for ids in said]

    return _answers(worker, cfg, held_out, voice, answer, alive)


def ranking(
    worker: MegatronWorker,
    cfg: Config,
    held_out: EvalSet,
    voice: "Voice",
    candidates: Sequence[str],
    alive: Callable[[], None],
) -> tuple[float, list[Answer]]:
    """The part of the questions whose right answer has the highest log-prob of all candidates;
    this replica's answers. A candidate follows eval.prefill."""
    texts = [cfg.eval.prefill + candidate for candidate in candidates]
    ids = [[*voice.tokenizer(text)["input_ids"], voice.end_id] for text in texts]
    stripped = {text.strip() for text in texts}

    def answer(questions: Sequence[Question]) -> list[str]:
        found = []
        for question in questions:
            alive()
            if (right := voice.text(question.answer_ids)) not in stripped:
                raise DataError(
                    f"the answer {right!r} is not among the {len(texts)} candidates with the "
                    f"prefill, such as {texts[0]!r}; correct eval.candidates or eval.prefill"
                )
            log_probs = rank(worker, question.prompt, ids)
            found.append(texts[max(range(len(texts)), key=log_probs.__getitem__)].strip())
        return found

    return _answers(worker, cfg, held_out, voice, answer, alive)


@dataclass(frozen=True)
class Voice:
    """The tokenizer, and the words that every answer begins with."""

    tokenizer: PreTrainedTokenizerBase
    end_id: int
    prefill_ids: tuple[int, ...]

    @staticmethod
    def of(cfg: Config) -> "Voice":
        tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
        # A space belongs to the token of the word behind it.
        prefill = cfg.eval.prefill.rstrip()
        ids = tokenizer(prefill)["input_ids"] if prefill else []
        return Voice(tokenizer, tokenizer.convert_tokens_to_ids(END), tuple(ids))

    def prompt(self, question: Question) -> Row:
        """The question with the first words of its answer."""
        ids_S = torch.cat([question.prompt.ids_S, torch.tensor(self.prefill_ids, dtype=torch.long)])
        return replace(question.prompt, ids_S=ids_S, labels_S=torch.full_like(ids_S, IGNORE))

    def text(self, ids: Sequence[int]) -> str:
        """As answers are compared: white space around them does not count."""
        return str(self.tokenizer.decode(list(ids))).strip()


def _answers(
    worker: MegatronWorker,
    cfg: Config,
    held_out: EvalSet,
    voice: Voice,
    answer: Callable[[Sequence[Question]], list[str]],
    alive: Callable[[], None],
) -> tuple[float, list[Answer]]:
    handles = questions_of(worker, cfg, held_out)
    found: list[Answer] = []
    for start in range(0, len(handles), BLOCK):
        alive()
        questions = ask(worker, cfg, held_out, handles[start : start + BLOCK])
        for question, said in zip(questions, answer(questions), strict=True):
            found.append(Answer(question.handle, voice.text(question.answer_ids), said))
    right = sum(answer.is_right for answer in found)
    totals = torch.tensor([right, len(found)], dtype=torch.float64, device=worker.platform.device)
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    return float(totals[0] / totals[1].clamp(min=1)), found


def _count_tokens(worker: MegatronWorker, batches: Sequence[MicroBatch]) -> Tensor:
    """[3]: summed log-prob of the supervised tokens, how many are the likeliest, their count."""
    with evaluating(worker.ddp):
        step = partial(_forward_step, worker)
        outputs = run_schedule(worker.ddp, batches, step, forward_only=True)
    totals = torch.zeros(3, dtype=torch.float64, device=worker.platform.device)
    if worker.last:
        totals = torch.stack(outputs).sum(0)
    broadcast_from_last(totals)
    return totals


def _forward_step(
    worker: MegatronWorker, data: Iterator[MicroBatch], model: Any
) -> tuple[Tensor, Any]:
    batch = next(data).for_stage(worker.first, worker.platform.device)
    picked_BS = batch.targets_BS != IGNORE
    logits_NV = worker.call_model(model, batch, loss_mask=picked_BS)
    return logits_NV, partial(_score, worker.model.real_vocab, batch.targets_BS[picked_BS])


def _score(vocab: int, targets_N: Tensor, logits_NV: Tensor, non_loss_data: bool = True) -> Tensor:
    right_N = pick_ids(logits_NV, vocab) == targets_N
    group = parallel_state.get_tensor_model_parallel_group()
    log_probs_N = target_log_probs(logits_NV, targets_N, vocab, group)
    count = targets_N.new_tensor(len(targets_N))
    return torch.stack([log_probs_N.double().sum(), right_N.sum().double(), count.double()])
