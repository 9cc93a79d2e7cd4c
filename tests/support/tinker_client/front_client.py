"""Runs in the environment of the public client: every call of it that the front must answer.

front_client.py BASE_URL MODEL: prints JSON of what was seen.
"""

import json
import sys
import urllib.request
from datetime import date

import tinker
from tinker import types

PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])


def datum(length=4):
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))),
        loss_fn_inputs={
            "target_tokens": types.TensorData(
                data=list(range(2, length + 2)), dtype="int64", shape=[length]
            ),
            "weights": types.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
        },
    )


def failed(future):
    try:
        future.result()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


def train(service, model, seen):
    training = service.create_lora_training_client(
        base_model=model, rank=8, user_metadata={"renderer_name": "x"}
    ).result()
    seen["model_id"] = training.model_id
    info = training.get_info()
    seen["info"] = [info.model_name, info.lora_rank, info.is_lora]
    data = [datum(4 + i % 3) for i in range(2500)]  # three requests, which are sent in parallel
    futures = [
        training.forward_backward(data, "cross_entropy"),
        training.optim_step(types.AdamParams()),
    ]
    result = futures[0].result()
    seen["outputs"] = [len(result.loss_fn_outputs), result.metrics]
    seen["first"] = result.loss_fn_outputs[0]["logprobs"].data
    seen["optim"] = futures[1].result().metrics
    seen["forward"] = len(training.forward([datum()], "cross_entropy").result().loss_fn_outputs)
    # A request that is refused takes its turn, and the model goes on.
    seen["bad_loss"] = failed(training.forward_backward([datum()], "ppo", {"beta": float("nan")}))
    seen["bad_step"] = failed(training.optim_step(types.AdamParams(learning_rate=-1.0)))
    seen["after"] = training.optim_step(types.AdamParams(learning_rate=0.5)).result().metrics
    return training


def checkpoints(service, url, training, seen):
    rest = tinker.RestClient(base_url=url)
    saved = training.save_state("step-1", ttl_seconds=3600).result().path
    seen["saved"] = saved
    sampler_path = training.save_weights_for_sampler("step-1").result().path
    external = training.save_weights_external("out").result().path
    seen["bad_name"] = failed(training.save_state("a/b"))
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    seen["listed"] = sorted(c.checkpoint_id for c in listed)
    seen["expiry"] = sum(c.expires_at is not None for c in listed)
    urls = rest.get_external_weights_urls(external).result().urls
    seen["files"] = {n: urllib.request.urlopen(u).read().decode() for n, u in urls.items()}
    run = rest.get_training_run(training.model_id).result()
    seen["run"] = [
        run.base_model,
        run.lora_rank,
        run.user_metadata,
        run.last_checkpoint.tinker_path,
    ]
    seen["runs"] = rest.list_training_runs().result().cursor.total_count
    seen["weights_info"] = rest.get_weights_info_by_tinker_path(saved).result().lora_rank
    rest.set_checkpoint_ttl_from_tinker_path(saved, None).result()
    seen["user"] = len(rest.list_user_checkpoints().result().checkpoints)
    loaded = service.create_training_client_from_state_with_optimizer(saved).result()
    seen["loaded"] = loaded.model_id
    seen["loaded_step"] = loaded.optim_step(types.AdamParams()).result().metrics
    rest.delete_checkpoint_from_tinker_path(external).result()
    seen["left"] = len(rest.list_checkpoints(training.model_id).result().checkpoints)
    reports(rest, url, saved, seen)
    seen["sessions"] = len(rest.list_sessions().result().sessions)
    return sampler_path


def reports(rest, url, saved, seen):
    me = rest.whoami().result()
    seen["whoami"] = [me.user_urn, me.org_urn, me.email]
    archive = tinker.ServiceClient(base_url=url, project_id="any")
    copies = [
        rest.copy_weights(saved, "any", ttl_seconds=3600).result(),
        archive.copy_weights(saved).result(),
    ]
    archive.close("success").result()
    seen["copies"] = [path.rpartition(":0/")[2] for path in copies]
    seen["searched"], cursor = [], None
    while cursor or not seen["searched"]:
        page = rest.search_sessions(types.SessionSearchRequest(limit=1, cursor=cursor)).result()
        seen["searched"] += [
            [s.status.type, "" if s.status.type == "active" else s.status.reason.type,
             s.checkpoints_count]
            for s in page.sessions
        ]  # fmt: skip
        cursor = page.next_cursor
    admin = tinker.AdminClient(base_url=url)
    (usage,) = admin.get_current_checkpoint_storage_usage().result().data
    seen["usage"] = [usage.checkpoint_count, usage.size_bytes, usage.user_name]
    log = admin.get_audit_log("checkpoints").result()
    seen["audit"] = [[e.event, e.purpose] for e in log.entries if e.tinker_path == saved]
    seen["audit_at_another_time"] = [
        len(admin.get_audit_log("teams").result().entries),
        len(admin.get_audit_log(day=date(2020, 1, 1)).result().entries),
    ]


def samples(service, training, sampler_path, model, seen):
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, temperature=0.5, stop=["a"])
    futures = [sampler.sample(PROMPT, num_samples=2, sampling_params=params) for _ in range(100)]
    seen["samples"] = sorted({len(f.result().sequences) for f in futures})
    first = futures[0].result().sequences[0]
    seen["sequence"] = [list(first.tokens), first.logprobs, str(first.stop_reason)]
    seen["prompt"] = sampler.compute_logprobs(PROMPT).result()
    seen["too_many"] = failed(sampler.sample(PROMPT, num_samples=9999, sampling_params=params))
    for name, made in (
        ("from_path", service.create_sampling_client(model_path=sampler_path).result()),
        ("from_base", service.create_sampling_client(base_model=model).result()),
    ):
        seen[name] = len(
            made.sample(PROMPT, num_samples=1, sampling_params=params).result().sequences
        )
    seen["base_model"] = sampler.get_base_model()


def main():
    url, model = sys.argv[1:]
    seen = {}
    service = tinker.ServiceClient(base_url=url)
    models = tinker.RestClient(base_url=url).get_server_capabilities().result().supported_models
    seen["capabilities"] = [m.model_name for m in models]
    training = train(service, model, seen)
    sampler_path = checkpoints(service, url, training, seen)
    samples(service, training, sampler_path, model, seen)
    seen["other_model"] = failed(service.create_lora_training_client("other/model", rank=8))
    # Said at once, where the client would send some statuses again for a minute.
    seen["no_room"] = failed(service.create_lora_training_client(model, rank=8))
    recording = service.create_sampling_client(base_model=model, record_stability_info=True)
    params = types.SamplingParams(max_tokens=4)
    seen["unstable"] = failed(recording.result().sample(PROMPT, 1, params))
    service.close("success").result()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
