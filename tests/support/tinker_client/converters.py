"""The client's own converters on the other side of the service's: what it writes is read as it was
meant, and it reads what is written here.

Runs in the environment of `make tinker-env`, where nothing that our package needs is installed:
tests/serve/test_tinker_client.py starts it.
"""

import json
import sys

import numpy as np
import pytest
import tinker
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker._compat import model_dump
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.lib.public_interfaces.sampling_client import _tensor_data_to_model
from tinker.proto import tinker_public_pb2 as theirs
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from megatron_vlm.serve.protocol.answers import REDUCTIONS, write_forward_backward, write_samples
from megatron_vlm.serve.protocol.payloads import (
    NO_LOG_PROB,
    Picture,
    RequestError,
    Sampled,
    Samples,
    Text,
    TopK,
    decompress,
)
from megatron_vlm.serve.protocol.request_tensors import NOTHING, read_prompt_targets
from megatron_vlm.serve.protocol.requests import read_forward_backward, read_prompt

EXAMPLES = settings(max_examples=150, deadline=None)

tokens = st.integers(0, 2**31 - 1)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
some_floats = floats | st.just(0.0)
texts = st.builds(lambda ids: types.EncodedTextChunk(tokens=ids), st.lists(tokens, max_size=8))
heads = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}  # how their files begin
images = st.builds(
    lambda data, form, expected: types.ImageChunk(
        data=heads[form] + data, format=form, expected_tokens=expected
    ),
    st.binary(max_size=40),
    st.sampled_from(["png", "jpeg"]),
    st.none() | st.integers(1, 10_000),
)
inputs = st.builds(
    lambda first, more: types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[first]), *more]),
    tokens,
    st.lists(texts | images, max_size=4),
)
options = st.dictionaries(
    st.text(max_size=8), st.floats(allow_nan=False) | st.integers(-9, 9) | st.text(max_size=8)
)


@st.composite
def arrays(draw, shape, values, dtype):
    count = int(np.prod(shape))
    drawn = draw(st.lists(values, min_size=count, max_size=count))
    return np.array(drawn, dtype).reshape(shape)


@st.composite
def shapes(draw):
    length = draw(st.integers(1, 6))
    return draw(st.sampled_from([(length,), (length, draw(st.integers(1, 5)))]))


@st.composite
def datums(draw):
    """What a user may give: numpy or torch, 64 bits or 32, two dimensions perhaps sparse."""
    shape = draw(shapes())
    targets = draw(arrays(shape, tokens | st.just(0), np.int64))
    weights = draw(arrays(shape, some_floats, np.float32))
    if len(shape) == 2:  # many zeros, so that the client makes them sparse
        keep = draw(arrays(shape, st.sampled_from([0, 0, 0, 1]), np.int64))
        targets, weights = targets * keep, weights * keep.astype(np.float32)
    meant = {"target_tokens": targets, "weights": weights}
    for name in draw(st.sets(st.sampled_from(["logprobs", "advantages", "sequence_ratio_mask"]))):
        meant[name] = draw(arrays(shape, some_floats, np.float32))
    given_as = draw(st.sampled_from([np.asarray, torch.from_numpy, np.ndarray.tolist]))
    given = {name: given_as(array) for name, array in meant.items()}
    return types.Datum(model_input=draw(inputs), loss_fn_inputs=given), meant


def body_of(data, options=None, loss="cross_entropy", forward_only=False, seq_id=1):
    """As the client's resources/training.py makes it."""
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=data, loss_fn=loss, loss_fn_config=options
        ),
        model_id="session:train:0",
        seq_id=seq_id,
    )
    written = forward_backward_request_to_proto(request)
    written.forward_only = forward_only
    return written.SerializeToString()


def same_chunks(found, given):
    assert len(found) == len(given)
    for ours, their in zip(found, given, strict=True):
        if isinstance(their, types.EncodedTextChunk):
            assert isinstance(ours, Text) and ours.tokens.dtype == np.int32
            assert ours.tokens.tolist() == list(their.tokens)
        else:
            assert ours == Picture(their.data, their.format, their.expected_tokens)


def same_arrays(found, meant):
    assert found.keys() == meant.keys()
    for name, array in meant.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@EXAMPLES
@given(
    st.lists(datums(), min_size=1, max_size=3),
    st.none() | options,
    st.sampled_from(["cross_entropy", "ppo", "gspo"]),
    st.booleans(),
    st.integers(1, 2**31 - 1),
    st.booleans(),
)
def test_what_the_client_asks_for(data, config, loss, forward_only, seq_id, packed):
    body = body_of([datum for datum, _ in data], config, loss, forward_only, seq_id)
    if packed:
        body = decompress(zstandard.ZstdCompressor().compress(body), len(body))
    found = read_forward_backward(body)
    assert (found.model_id, found.seq_id) == ("session:train:0", seq_id)
    assert (found.loss, found.forward_only) == (loss, forward_only)
    assert found.options == (config or {})
    assert len(found.data) == len(data)
    for ours, (datum, meant) in zip(found.data, data, strict=True):
        same_chunks(ours.chunks, datum.model_input.chunks)
        same_arrays(ours.inputs, meant)


def is_sparse(body):
    request = theirs.ForwardBackwardRequest.FromString(body)
    return request.data[0].loss_fn_inputs["weights"].HasField("sparse_csr")


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_sparse_tensors(rows):
    """Those of distillation: few of many columns, in rows of which some are empty."""
    chance = np.random.default_rng(rows)
    weights = np.where(chance.random((rows, 40)) < 0.05, chance.random((rows, 40)), 0)
    weights = torch.from_numpy(weights.astype(np.float32))
    targets = (weights * 1000).ceil().long()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(rows))),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    body = body_of([datum])
    assert is_sparse(body)
    meant = {"target_tokens": targets.numpy(), "weights": weights.numpy()}
    same_arrays(read_forward_backward(body).data[0].inputs, meant)


def test_what_their_messages_have_and_their_converter_does_not():
    """Narrow dtypes, a shape left out, the sides of an image, options of old clients."""
    request = theirs.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    request.loss_fn_config["beta"] = 0.1
    datum = request.data.add()
    image = datum.model_input.add().image
    image.data, image.format = heads["jpeg"] + b"file", "jpeg"
    image.override_dimensions.width, image.override_dimensions.height = 30, 20
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array([1, 2], np.int32).tobytes(), theirs.DTYPE_INT32
    weights = datum.loss_fn_inputs["weights"]
    meant = torch.tensor([-1.5, 0.1], dtype=torch.bfloat16)
    weights.dense, weights.dtype = meant.view(torch.int16).numpy().tobytes(), theirs.DTYPE_BFLOAT16
    weights.shape.append(2)
    span = datum.model_input_spans.add().sampled_tokens
    span.sequence_id, span.length = "a", 2
    found = read_forward_backward(request.SerializeToString())
    assert found.options == {"beta": 0.1}
    assert found.data[0].chunks == (Picture(image.data, "jpeg", None, (30, 20)),)
    same_arrays(
        found.data[0].inputs, {"target_tokens": np.array([1, 2]), "weights": meant.float().numpy()}
    )


def test_audio_is_refused():
    datum = theirs.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    datum.data.add().model_input.add().dmel.dmel = b"abc"
    with pytest.raises(RequestError, match=r"data\[0\]\.model_input\[0\] is audio"):
        read_forward_backward(datum.SerializeToString())


@EXAMPLES
@given(inputs)
def test_prompts(prompt):
    """As the client's resources/sampling.py makes them."""
    request = types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams())
    body = model_dump(request, exclude_unset=False, exclude_none=True, mode="json")
    same_chunks(read_prompt(json.loads(json.dumps(body))["prompt"]["chunks"]), prompt.chunks)
    same_chunks(read_prompt(prompt.model_dump(mode="json")["chunks"]), prompt.chunks)


@EXAMPLES
@given(st.data())
def test_loss_outputs(data):
    names = data.draw(st.sets(st.sampled_from(["logprobs", "entropy", "ids"]), min_size=1))
    outputs = []
    for _ in range(data.draw(st.integers(0, 5))):
        shape = data.draw(shapes())
        outputs.append(
            {
                name: data.draw(arrays(shape, tokens, np.int64))
                if name == "ids"
                else data.draw(arrays(shape, st.floats(width=32), np.float32))
                for name in sorted(names)
            }
        )
    metrics = data.draw(
        st.dictionaries(
            st.sampled_from([f"{name}:{how}" for name in ("loss", "a b") for how in REDUCTIONS]),
            st.floats(),
        )
    )
    found = deserialize_forward_backward_output(write_forward_backward(outputs, metrics))
    assert found.loss_fn_output_type == "ArrayRecord"
    np.testing.assert_equal(found.metrics, metrics)
    assert len(found.loss_fn_outputs) == len(outputs)
    for their, ours in zip(found.loss_fn_outputs, outputs, strict=True):
        assert their.keys() == ours.keys()
        for name, array in ours.items():
            assert their[name].shape == list(array.shape)
            read = their[name].to_numpy()
            assert read.dtype == array.dtype
            np.testing.assert_array_equal(read, array)


def test_the_client_joins_the_answers_of_a_call():
    """It divides the datums of a call among requests and makes one answer of theirs."""
    first = [
        {"logprobs": np.array([-1, -2], np.float32)},
        {"logprobs": np.ones((1, 3), np.float32)},
    ]
    second = [{"logprobs": np.array([-3], np.float32)}]
    joined = combine_fwd_bwd_output_results(
        [
            deserialize_forward_backward_output(write_forward_backward(first, {"loss:sum": 3.0})),
            deserialize_forward_backward_output(write_forward_backward(second, {"loss:sum": 4.0})),
        ]
    )
    assert joined.metrics == {"loss:sum": 7.0}
    assert [each["logprobs"].tolist() for each in joined.loss_fn_outputs] == [
        [-1.0, -2.0],
        [[1.0, 1.0, 1.0]],
        [-3.0],
    ]


@st.composite
def likeliest(draw, length):
    """None, or the likeliest tokens, and both as the client gives them to users."""
    k = draw(st.integers(0, 3))
    if not k:
        return None, None
    ids, log_probs = np.zeros((length, k), np.int32), np.full((length, k), NO_LOG_PROB, np.float32)
    lists = []
    for row in range(length):
        pairs = draw(st.lists(st.tuples(tokens, st.floats(-9, 0, width=32)), max_size=k))
        for column, (token, log_prob) in enumerate(pairs):
            ids[row, column], log_probs[row, column] = token, log_prob
        lists.append(pairs or None)
    return TopK(ids, log_probs), lists


@EXAMPLES
@given(st.data())
def test_samples(data):
    sequences, lists = [], []
    for _ in range(data.draw(st.integers(0, 3))):
        length = data.draw(st.integers(1, 5))
        top, as_lists = data.draw(likeliest(length))
        log_probs = data.draw(st.none() | arrays((length,), floats, np.float32))
        ids = data.draw(arrays((length,), tokens, np.int32))
        sequences.append(Sampled(ids, log_probs, data.draw(st.booleans()), top))
        lists.append(as_lists)
    length = data.draw(st.integers(1, 5))
    top, prompt_lists = data.draw(likeliest(length))
    prompt = data.draw(st.none() | arrays((length,), floats | st.just(np.nan), np.float32))
    asked = data.draw(st.none() | arrays((length, 2), floats, np.float32))
    found = deserialize_sample_response(
        write_samples(Samples(tuple(sequences), prompt, top, asked))
    )

    assert len(found.sequences) == len(sequences)
    for their, ours, as_lists in zip(found.sequences, sequences, lists, strict=True):
        assert their.tokens == ours.tokens.tolist()
        assert their.stop_reason == ("stop" if ours.stopped else "length")
        assert their.logprobs == (None if ours.log_probs is None else ours.log_probs.tolist())
        assert their.topk_logprobs == as_lists
    if prompt is None:
        assert found.prompt_logprobs is None
    else:
        assert found.prompt_logprobs == [None if np.isnan(x) else x for x in prompt.tolist()]
    assert found.topk_prompt_logprobs == prompt_lists
    if asked is None:
        assert found.target_prompt_logprobs is None
    else:
        assert found.target_prompt_logprobs.shape == list(asked.shape)
        np.testing.assert_array_equal(found.target_prompt_logprobs.to_numpy(), asked)
    assert found.prompt_cache_hit_tokens == 0


@EXAMPLES
@given(st.integers(1, 8), st.integers(1, 6), st.floats(0, 1), st.randoms(use_true_random=False))
def test_log_probs_of_chosen_tokens(places, columns, share, chance):
    """As the client asks for them, dense or sparse, and gets them: here each id is its own."""
    ids = torch.tensor(
        [
            [chance.randrange(100, 200) if chance.random() < share else -1 for _ in range(columns)]
            for _ in range(places)
        ]
    )
    for tensor in (
        types.TensorData.from_torch(ids),
        types.TensorData.from_torch_sparse(ids, pad_value=-1),
    ):
        said = json.loads(_tensor_data_to_model(tensor).model_dump_json())
        asked = read_prompt_targets(said, places + 1)
        log_probs = np.where(asked.ids_RJ == NOTHING, 0, asked.ids_RJ).astype(np.float32)
        answer = write_samples(Samples((), target_prompt_log_probs=asked.answer(log_probs)))
        found = deserialize_sample_response(answer).target_prompt_logprobs
        assert (found.sparse_crow_indices is None) == (tensor.sparse_crow_indices is None)
        assert found.to_torch().tolist() == ids.where(ids >= 0, 0).tolist()


@EXAMPLES
@given(st.lists(datums(), min_size=1, max_size=2), st.randoms(use_true_random=False))
def test_what_arrives_broken_is_refused_or_read(data, chance):
    body = bytearray(body_of([datum for datum, _ in data], {"a": 1.0, "b": "c"}))
    for _ in range(chance.randrange(1, 4)):
        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    body = bytes(body)[: chance.randrange(len(body) + 1) if chance.random() < 0.3 else None]
    try:
        assert read_forward_backward(body).data
    except RequestError as error:
        assert len(str(error)) < 3000


def test_this_is_the_client_and_nothing_else_of_ours():
    assert tinker.__version__
    assert not {"fastapi", "megatron", "hydra"} & set(sys.modules)
