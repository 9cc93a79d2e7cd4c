"""Routes of sampling sessions, samples and the results of all calls."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.http.context import (
    Answer,
    AppContext,
    Context,
    Key,
    is_adapter_file,
    open_session,
    own_checkpoint,
    require_model,
    require_sampler,
)
from megatron_vlm.serve.http.request_bodies import (
    HttpError,
    RequestLimits,
    check_chunks,
    parse_body,
    refusal,
)
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    Call,
    Failure,
    NamedCheckpoint,
    Result,
    SamplingSession,
    sampler_id,
)
from megatron_vlm.serve.protocol.payloads import RequestError

router = APIRouter(prefix="/api/v1")
_PROTOBUF = "application/x-protobuf"


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, context: Context, key: Key) -> Answer:
    """Create a sampling session on a checkpoint or on the base model."""
    form = await context.form(request, schemas.CreateSamplingSession)
    session = open_session(context, key, form.session_id)
    sampler = sampler_id(session.id, form.sampling_session_seq_id)
    if form.model_path is not None:
        checkpoint = own_checkpoint(context, key, form.model_path)
        if not can_be_sampled(context, checkpoint):
            raise HttpError(
                422,
                f"model_path: {form.model_path} was made to be downloaded; sample from weights or "
                "sampler_weights",
            )
        new = session_of_checkpoint(context, sampler, session.id, checkpoint)
    elif form.base_model in context.facts.base_models:
        new = SamplingSession(sampler, session.id, None, form.base_model)
    else:
        raise HttpError(
            422,
            f"base_model: {form.base_model!r}, and this server has "
            f"{' or '.join(context.facts.base_models)}; or give a model_path",
        )
    await context.write(context.journal.create_sampler, new)
    return {"type": "create_sampling_session", "sampling_session_id": sampler}


def can_be_sampled(context: AppContext, checkpoint: NamedCheckpoint) -> bool:
    """Return whether samples can be drawn from this checkpoint."""
    return checkpoint.kind != "external" or is_adapter_file(context, checkpoint)


def session_of_checkpoint(
    context: AppContext, sampler: str, session: str, checkpoint: NamedCheckpoint
) -> SamplingSession:
    """Return a new sampling session on a checkpoint, which is of the key of its model."""
    base = require_model(context, checkpoint.key, checkpoint.model).base_model
    return SamplingSession(
        *(sampler, session, checkpoint.model, base, checkpoint.folder, checkpoint.path),
        facts=checkpoint.facts,
    )


@router.get("/samplers/{sampler}")
async def sampler(sampler: str, context: Context, key: Key) -> Answer:
    """Return the model that a sampling session samples from."""
    record = require_sampler(context, key, sampler)
    return {"sampler_id": record.id, "base_model": record.base_model, "model_path": record.path}


@router.post("/join_sampling_session")
async def join(request: Request, context: Context, key: Key) -> Answer:
    """Return a number for another client of a sampling session, from which its seq_ids begin."""
    name = await context.field(request, "sampling_session_id")
    record = require_sampler(context, key, name)
    number = await context.write(context.journal.join_sampler, record.id)
    return {"type": "join_sampling_session", "client_counter": number}


@router.post("/asample")
async def asample(request: Request, context: Context, key: Key) -> Answer:
    """Queue samples of one prompt. They have no fixed order with other samples."""
    body = await context.body(request, "sample_bytes")
    form = await parse_body(body, context.read, schemas.SampleForm)
    try:
        check_sample(form, context.limits, context.facts.vocabulary)
    except RequestError as error:
        raise HttpError(422, str(error)) from error
    if form.grammar is not None:
        raise HttpError(422, "grammar: only the routes of chats and completions check one")
    require_sampler(context, key, form.sampling_session_id)
    new = Call(SAMPLE, form.sampling_session_id, form.seq_id, key, body)
    request_id = await context.promise(new)
    ids = [f"{request_id}:{i}" for i in range(form.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}


@router.post("/cancel_future")
async def cancel(request: Request, context: Context, key: Key) -> Answer:
    """Cancel a sample. A sample that has started is finished all the same."""
    name = await context.field(request, "request_id")
    return {"cancelled": await context.write(context.journal.cancel, name, key)}


@router.post("/retrieve_future")
async def retrieve(request: Request, context: Context, key: Key) -> Response:
    """Return the result as soon as it exists. After a 408 the client asks again."""
    name = await context.field(request, "request_id")
    result = context.journal.result(name)
    if result is None or result.key != key:
        return _unknown(name)
    if result.outcome is None and not result.dropped:
        result = await context.waiters.result(name, context.limits.poll_seconds)
    if result is None:
        return JSONResponse({"queue_state": "active", "request_id": name}, 408)
    if result.outcome is None:
        return _unknown(name)
    context.journal.touch_result(name)
    return _answer(context, request, result)


def _answer(context: AppContext, request: Request, result: Result) -> Response:
    outcome = result.outcome
    assert outcome is not None
    if isinstance(outcome, Failure):
        return JSONResponse({"error": outcome.text, "category": outcome.category})
    if outcome.content_type == "json":
        return Response(outcome.content, media_type="application/json")
    accepted = request.headers.get("accept", "*/*")
    if _PROTOBUF not in accepted and "*/*" not in accepted:
        return refusal(406, f"this result is {_PROTOBUF}, and the request accepts {accepted[:100]}")
    return Response(outcome.content, media_type=_PROTOBUF)


def _unknown(name: str) -> Response:
    """Return the error for an unknown request id. After a 410 a client sends its sample again. Any
    other call gets a 404, which reports it as lost: if the client sent it again by itself, it might
    be done twice."""
    if name.startswith(f"{SAMPLE}-"):
        return refusal(410, f"request_id: the result of {name[:100]} is no longer kept")
    return refusal(
        404, f"request_id: nothing is known of {name[:100]!r}, or its result is no longer kept"
    )


def check_sample(form: schemas.SampleForm, limits: RequestLimits, vocabulary: int) -> None:
    """Refuse a request above a limit, or for more tokens than the vocabulary has."""
    params = form.sampling_params
    stop = params.stop if isinstance(params.stop, list) else [params.stop]
    for name, count, maximum, limit in (
        ("num_samples", form.num_samples, limits.num_samples, "num_samples"),
        ("sampling_params.max_tokens", params.max_tokens or 0, limits.max_tokens, "max_tokens"),
        ("topk_prompt_logprobs", form.topk_prompt_logprobs, limits.top_k, "top_k"),
        ("topk_sample_logprobs", form.topk_sample_logprobs, limits.top_k, "top_k"),
    ):
        if count > maximum:
            raise RequestError(f": limit {limit} is {maximum}", key=name, found=count)
    if len(stop) > limits.stop:
        raise RequestError(
            f"has {len(stop)} entries, and limit stop is {limits.stop}", key="sampling_params.stop"
        )
    chunks = form.prompt.chunks
    pictures = sum(chunk.get("type") != "encoded_text" for chunk in chunks)
    tokens = [each for chunk in chunks if isinstance(each := chunk.get("tokens"), list)]
    check_chunks("prompt", len(chunks), pictures, sum(map(len, tokens)), limits)
    schemas.check_top_k(form, vocabulary)
