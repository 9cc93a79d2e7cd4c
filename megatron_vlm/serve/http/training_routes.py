"""Routes of models and their calls, which are done in the order of seq_id."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError

from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.http.context import (
    Answer,
    AppContext,
    Context,
    Key,
    complaints,
    is_adapter_file,
    open_session,
    own_checkpoint,
    parsed_object,
    require_model,
)
from megatron_vlm.serve.http.request_bodies import (
    HEAD_BYTES,
    HttpError,
    RequestLimits,
    UnreadableError,
    check_datums,
    parse_body,
)
from megatron_vlm.serve.journal.journal_records import (
    Call,
    Failure,
    Model,
    NamedCheckpoint,
    model_id,
)
from megatron_vlm.serve.protocol.payloads import ForwardBackward, RequestError
from megatron_vlm.serve.protocol.requests import read_forward_backward, read_place

router = APIRouter(prefix="/api/v1")


@router.post("/create_model")
async def create_model(request: Request, context: Context, key: Key) -> Answer:
    """Create a model on the base model. LoRA rank 0 trains all weights."""
    body = await context.body(request)
    form = context.read(body, schemas.CreateModel)
    session = open_session(context, key, form.session_id)
    check_base_model(context, form.base_model)
    rank = 0 if form.lora_config is None else form.lora_config.rank
    name = model_id(session.id, form.model_seq_id)
    model = Model(name, session.id, form.base_model, rank, form.user_metadata or {})
    new = Call("create_model", session.id, form.model_seq_id, key, body, model=model)
    return await _promise(context, new, name)


@router.post("/load_weights")
async def load_weights(request: Request, context: Context, key: Key) -> Answer:
    """Create a model from a checkpoint or, in the older form, load one into an existing model."""
    body = await context.body(request)
    if parsed_object(body).get("session_id") is None:
        return await _queue_training_call(context, key, "load_weights", body)
    form = context.read(body, schemas.LoadModel)
    session = open_session(context, key, form.session_id)
    checkpoint = _training_checkpoint(context, key, form)
    if form.base_model is not None:
        check_base_model(context, form.base_model)
    origin = require_model(context, key, checkpoint.model)
    model = Model(
        id=model_id(session.id, form.model_seq_id),
        session=session.id,
        base_model=origin.base_model,
        lora_rank=origin.lora_rank,
        user_metadata=form.user_metadata or {},
        source=checkpoint.folder,
    )
    new = Call("load_model", session.id, form.model_seq_id, key, body, model=model)
    await context.write(context.journal.record_read, checkpoint, "load")
    return await _promise(context, new, model.id)


@router.post("/forward_backward")
async def forward_backward(request: Request, context: Context, key: Key) -> Answer:
    """Queue a part of a batch, sent as protobuf. A wrong request takes its turn, too, and fails."""
    try:
        body = await context.bodies.read(request, "body_bytes")
        parsed = await parse_body(body, _read_batch, context.limits)
    except UnreadableError as error:
        if (place := read_place(error.head)) is None:
            raise
        require_model(context, key, place[0], usable=True)
        refused = Call("forward_backward", *place, key, failure=Failure(error.text, "user"))
        return await _promise(context, refused, refused.owner)
    model, changes = parsed.model_id, not parsed.forward_only
    require_model(context, key, model, usable=True)
    new = Call("forward_backward", model, parsed.seq_id, key, body, changes, parsed=parsed)
    return await _promise(context, new, model)


async def queue_ordered_call(request: Request, context: Context, key: Key) -> Answer:
    """Queue the call that the path names."""
    kind = request.url.path.rpartition("/")[2]
    return await _queue_training_call(context, key, kind, await context.body(request))


for _name, (_form, _) in schemas.CALL_FORMS.items():
    if issubclass(_form, schemas.OrderedForm) and _name != "load_weights":
        router.add_api_route(f"/{_name}", queue_ordered_call, methods=["POST"])


@router.post("/unload_model")
async def unload_model(request: Request, context: Context, key: Key) -> Answer:
    """Unload a model that is no longer needed. Its checkpoints stay."""
    body = await context.body(request)
    form = context.read(body, schemas.ModelIdForm)
    require_model(context, key, form.model_id)
    # The call needs no seq_id because a model is unloaded only once.
    unload = Call("unload_model", f"{form.model_id}:unload", 0, key, body)
    return await _promise(context, unload, form.model_id)


@router.post("/get_info")
async def get_info(request: Request, context: Context, key: Key) -> Answer:
    """Return the facts about a model."""
    model = require_model(context, key, await context.field(request, "model_id"))
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_name": model.base_model,
        "is_lora": model.lora_rank > 0,
        "lora_rank": model.lora_rank or None,
        "model_data": {
            "arch": context.facts.arch,
            "model_name": model.base_model,
            "tokenizer_id": context.facts.tokenizer_id,
        },
        "optimizer_config": {"type": "adamw"},
    }


def _read_batch(body: bytes, limits: RequestLimits) -> ForwardBackward:
    try:
        request = read_forward_backward(body)
        check_datums(request.data, limits)
    except RequestError as error:
        raise UnreadableError(422, str(error), body[:HEAD_BYTES]) from error
    return request


async def _queue_training_call(context: AppContext, key: str, kind: str, body: bytes) -> Answer:
    """Queue a call that takes its turn. A wrong call takes its turn, too, and fails: otherwise the
    calls after it would wait for its number for ever."""
    form_class, changes_model = schemas.CALL_FORMS[kind]
    failure = None
    try:
        form = form_class.model_validate_json(body or b"{}")
        assert isinstance(form, schemas.OrderedForm)
        model, seq = form.model_id, form.seq_id
        if isinstance(form, schemas.LoadWeights):
            require_model(context, key, model, usable=True)
            try:
                checkpoint = _training_checkpoint(context, key, form)
                await context.write(context.journal.record_read, checkpoint, "load")
            except HttpError as error:
                failure = Failure(error.text, "user")
    except ValidationError as error:
        if (place := _place(parsed_object(body))) is None:
            raise HttpError(422, complaints(error)) from error
        (model, seq), failure = place, Failure(complaints(error), "user")
    require_model(context, key, model, usable=True)
    new = Call(kind, model, seq, key, body, changes_model, failure=failure)
    return await _promise(context, new, model)


def _place(value: dict[str, Any]) -> tuple[str, int] | None:
    model, seq = value.get("model_id"), value.get("seq_id")
    if not isinstance(model, str) or not isinstance(seq, int) or not 0 < seq < 2**62:
        return None
    try:
        model.encode()  # Half of a surrogate pair cannot be in a name.
    except UnicodeEncodeError:
        return None
    return model, int(seq)


def _training_checkpoint(
    context: AppContext, key: str, form: schemas.LoadModel | schemas.LoadWeights
) -> NamedCheckpoint:
    checkpoint = own_checkpoint(context, key, form.path)
    if is_adapter_file(context, checkpoint):
        if form.optimizer:
            raise HttpError(
                422,
                f"optimizer: {form.path} has no state of an optimizer; load it without, by "
                "create_training_client_from_state",
            )
    elif checkpoint.kind != "training":
        raise HttpError(
            422,
            f"path: {form.path} holds {checkpoint.id.split('/')[0]}, and training goes on from "
            "weights, which save_state saves, or from an adapter in external_weights",
        )
    return checkpoint


def check_base_model(context: AppContext, name: str) -> None:
    if name not in context.facts.base_models:
        raise HttpError(
            422,
            f"base_model: {name!r}, and this server trains "
            + " or ".join(context.facts.base_models),
        )


async def _promise(context: AppContext, new: Call, model: str) -> Answer:
    return {"request_id": await context.promise(new), "model_id": model}
