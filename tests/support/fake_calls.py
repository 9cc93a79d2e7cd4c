"""A service's engine without a model, for tests of the service's journal and HTTP front."""

import contextlib
import json
import threading
import time
from pathlib import Path

import numpy as np

from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.http.context import ServerFacts
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import (
    Changes,
    Failure,
    Finished,
    ModelChange,
    NamedCheckpoint,
    Outcome,
    SamplingSession,
    Saved,
    model_id,
    sampler_id,
    tinker_path,
)
from megatron_vlm.serve.protocol.answers import write_forward_backward, write_samples
from megatron_vlm.serve.protocol.payloads import Sampled, Samples
from megatron_vlm.serve.protocol.requests import read_forward_backward

FACTS = ServerFacts(("tiny/model", "tiny"), 512, None, None, "1.2", None, "tp1 pp1 dp1", 509)


def answer(value):
    return Outcome(json.dumps(value).encode())


class StandIn:
    """An engine that executes calls as they arrive and records them: `done` has (kind, owner,
    seq)."""

    def __init__(self, journal: Journal, hold=()):
        self.journal = journal
        self.hold = set(hold)  # kinds of calls that stay pending
        self.done = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="stand-in engine")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop = True
        self.journal.ring()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self):
        while not self._stop:
            self.journal.wait(0.2)
            for call in self.journal.next_calls():
                if call.kind in self.hold or not self.journal.begin_calls(call.request_id):
                    continue
                outcome, changes = self._do(call, self.journal.body(call.request_id))
                self.done.append((call.kind, call.owner, call.seq))
                self.journal.finish(call.request_id, outcome, changes)

    def _do(self, call, body):
        return getattr(self, f"_{call.kind}")(call, body)

    def _create_model(self, call, body):
        name = model_id(call.owner, call.seq)
        ready = ModelChange(name, state="ready", figures={"loss": 1.5})
        return answer({"model_id": name, "type": "create_model"}), Changes(models=(ready,))

    def _load_model(self, call, body):
        name, path = model_id(call.owner, call.seq), json.loads(body)["path"]
        source = self.journal.model(name).source
        if not (source / "weights").is_file():
            return Failure(f"{path} is gone", "user"), Changes()
        outcome = answer({"model_id": name, "path": path, "type": "load_weights"})
        return outcome, Changes(models=(ModelChange(name, state="ready"),))

    def _load_weights(self, call, body):
        return answer({"path": json.loads(body)["path"], "type": "load_weights"}), Changes()

    def _forward_backward(self, call, body):
        request = read_forward_backward(body)
        if request.loss == "custom":
            return Failure("loss_fn 'custom' is not supported", "user"), Changes()
        outputs = [
            {"logprobs": np.full(d.inputs["target_tokens"].shape, -0.5, np.float32)}
            for d in request.data
        ]
        metrics = {"loss:sum": 0.5 * len(outputs)}
        return Outcome(write_forward_backward(outputs, metrics), "protobuf"), Changes()

    def _optim_step(self, call, body):
        rate = schemas.OptimStep.model_validate_json(body).adam_params.learning_rate
        return answer({"metrics": {"lr:mean": rate}, "type": "optim_step"}), Changes()

    def _folder(self, call) -> Path:
        folder = self.journal.run / "checkpoints" / call.request_id
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w" * 10)
        return folder

    def _saved(self, call, body, kind, form):
        value, folder = form.model_validate_json(body), self._folder(call)
        expires = None if value.ttl_seconds is None else time.time() + value.ttl_seconds
        checkpoint = NamedCheckpoint(
            *(call.owner, kind, value.path, folder, 10, expires), value.user_metadata or {}
        )
        outcome = answer({"path": tinker_path(call.owner, kind, value.path), "type": call.kind})
        saved = (Saved(call.owner, call.seq, folder),) if kind == "training" else ()
        return outcome, Changes(checkpoints=(checkpoint,), saved=saved)

    def _save_weights(self, call, body):
        return self._saved(call, body, "training", schemas.SaveWeights)

    def _save_weights_external(self, call, body):
        return self._saved(call, body, "external", schemas.SaveWeightsExternal)

    def _save_weights_for_sampler(self, call, body):
        form = schemas.SaveWeightsForSampler.model_validate_json(body)
        if form.path is not None:
            return self._saved(call, body, "sampler", schemas.SaveWeightsForSampler)
        model = self.journal.model(call.owner)
        name = sampler_id(model.session, form.sampling_session_seq_id)
        new = SamplingSession(name, model.session, model.id, model.base_model, self._folder(call))
        return answer({"sampling_session_id": name}), Changes(samplers=(new,))

    def _asample(self, call, body):
        form = schemas.SampleForm.model_validate_json(body)
        length = sum(len(c.get("tokens", ())) for c in form.prompt.chunks)
        tokens = np.arange(1, 4, dtype=np.int32)
        one = Sampled(tokens, np.full(3, -0.25, np.float32), stopped=True)
        prompt = None
        if form.prompt_logprobs:
            prompt = np.full(length, -0.5, np.float32)
            prompt[0] = np.nan
        return Outcome(write_samples(Samples((one,) * form.num_samples, prompt)), "protobuf"), (
            Changes()
        )

    def _unload_model(self, call, body):
        name = json.loads(body)["model_id"]
        ended = ModelChange(name, state="unloaded")
        return answer({"model_id": name, "type": "unload_model"}), Changes(models=(ended,))


class CallJournal(Journal):
    """A journal with methods for a single call."""

    def accept(self, new):
        return self.accept_all([new])[0]

    def finish(self, request_id, outcome, changes=Changes()):
        return self.finish_all([Finished(request_id, outcome, changes)])[0]


@contextlib.contextmanager
def opened(run, **options):
    journal = CallJournal(run, **options)
    try:
        yield journal
    finally:
        journal.close()
