"""Protobuf messages of the protocol, created when this module is imported.

They live in a descriptor pool of their own, so that they do not collide with the client's messages
in the same process. They read the same bytes as the client's file, with three differences. Maps are
repeated entries, so that a name that occurs twice can be refused. Enums are numbers, so that an
error can name unknown ones. The fields of a oneof are optional, so that two at once can be refused.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from megatron_vlm.io.untrusted import UntrustedFile
from megatron_vlm.serve.protocol.payloads import RequestError

# Maximum fields of a request; a thousand datums have about 30,000. A field that takes two bytes in
# the body may take a hundred once it is parsed.
MAX_FIELDS = 2**19

_PACKAGE = "megatron_vlm.service"
# Each field is "number name type". A * means repeated; a ? means that absence can be detected.
_MESSAGES = {
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string,"
    "5 loss_fn_config NumberEntry*, 6 forward_only bool, 7 loss_fn_config_v2 OptionEntry*",
    "NumberEntry": "1 key string, 2 value double",
    "OptionEntry": "1 key string, 2 value Option",
    "Option": "1 number double?, 2 text string?",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs TensorEntry*",
    "Chunk": "1 encoded_text EncodedText, 2 image Image, 3 dmel Audio",
    "EncodedText": "1 tokens bytes",
    "Image": "1 data bytes, 2 format string, 3 expected_tokens int32?,"
    "4 override_dimensions Dimensions",
    "Dimensions": "1 width uint32, 2 height uint32",
    "Audio": "1 dmel bytes",
    "TensorEntry": "1 key string, 2 value Tensor",
    "Tensor": "1 dense bytes?, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*,"
    "3 metrics NumberEntry*",
    "ArrayRecord": "1 type_tag string, 2 fields BatchedEntry*, 3 num_datums int64",
    "BatchedEntry": "1 key string, 2 value BatchedTensor",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes?,"
    "3 topk_prompt_logprobs TopkLogprobs, 4 prompt_cache_hit_tokens int32,"
    "5 target_prompt_logprobs Tensor",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes?,"
    "4 topk_sampled_logprobs TopkLogprobs",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
}
_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5  # wire types


def message(name: str) -> Any:
    """Return an empty message. `_MESSAGES` lists the names."""
    return _CLASSES[name]()


def parse_message(name: str, body: bytes) -> Any:
    """Parse the message in `body`, which may be any bytes."""
    _check_fields(name, body)
    result = message(name)
    what = UntrustedFile(
        f"the body as {name}", RequestError, "send the protobuf message of that name"
    )
    with what.wrap_errors("is not readable"):
        result.ParseFromString(body)
    return result


def _make_classes() -> tuple[dict[str, Any], dict[str, dict[int, str]]]:
    """Create the classes, and for each class the types of its fields by number."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    types: dict[str, dict[int, str]] = {}
    for name, fields in _MESSAGES.items():
        types[name] = _describe(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }
    return classes, types


def _describe(described: Any, fields: str) -> dict[int, str]:
    kinds = descriptor_pb2.FieldDescriptorProto
    types = {}
    for line in fields.split(","):
        number, name, kind = line.split()
        one = described.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
        if kind.endswith("*"):
            one.label = kinds.LABEL_REPEATED
        if kind.endswith("?"):
            one.proto3_optional = True
            one.oneof_index = len(described.oneof_decl)
            described.oneof_decl.add(name=f"_{name}")
        types[int(number)] = kind
        kind = kind.rstrip("*?")
        if kind in _MESSAGES:
            one.type, one.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
        else:
            one.type = getattr(kinds, f"TYPE_{kind.upper()}")
    return types


_CLASSES, _TYPES = _make_classes()


def _check_fields(name: str, body: bytes) -> None:
    """Count the fields before any is allocated. Refuse a body that is cut off or is not
    protobuf."""
    pending: list[tuple[str, int, int]] = [(name, 0, len(body))]
    count = 0
    while pending:
        name, at, end = pending.pop()
        while at < end:
            number, start, after = next_field(body, at, end)
            kind = _TYPES[name].get(number, "").rstrip("*?")
            count += 1
            if start is not None and kind in _MESSAGES:
                pending.append((kind, start, after))
            elif start is not None and kind == "int64":
                count += after - start  # repeated numbers, packed
            if count > MAX_FIELDS:
                raise RequestError(
                    f"has more than {MAX_FIELDS} fields in {len(body)} bytes",
                    place="the body",
                    remedy="send fewer datums in a request, or longer chunks",
                )
            at = after


def next_field(body: bytes, at: int, end: int) -> tuple[int, int | None, int]:
    """Return the number of the field at this place, the start of its content if it has a size, and
    the start of the next field."""
    tag, after = _varint(body, at, end)
    wire, start = tag & 7, None
    if wire == _VARINT:
        _, after = _varint(body, after, end)
    elif wire == _SIZED:
        size, start = _varint(body, after, end)
        after = start + size
    elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
        after += 8 if wire == _EIGHT_BYTES else 4
    else:
        raise _no_protobuf(f"byte {at} begins a field of the wire type {wire}")
    if after > end:
        raise _no_protobuf(f"the field at byte {at} ends at {after}, and what it is in at {end}")
    return tag >> 3, start, after


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for i in range(10):
        if at + i >= end:
            raise _no_protobuf(f"the number at byte {at} is cut off at {end}")
        value |= (body[at + i] & 0x7F) << (7 * i)
        if body[at + i] < 0x80:
            return value, at + i + 1
    raise _no_protobuf(f"the number at byte {at} has more than 10 bytes")


def _no_protobuf(reason: str) -> RequestError:
    return RequestError(
        f"is not a protobuf message: {reason}",
        place="the body",
        remedy="send all that SerializeToString returns, and set Content-Encoding: zstd if it is "
        "packed",
    )
