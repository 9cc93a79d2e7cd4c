"""Features of programs that others wrote, tried on one server: JSON on standard output, as
{program: {feature: its value, or {"failed": text}}}. Arguments: the address, the model, the key,
and a file with {feature: body of a chat completion}."""

import asyncio
import base64
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}

import agents
import anthropic
import httpx
import litellm
import llm
import openai
from inspect_ai import model as inspect
from inspect_ai.tool import ToolInfo
from langchain_core.messages import convert_to_messages
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from llm.default_plugins.openai_models import Chat

URL, MODEL, KEY, FILE = sys.argv[1:]
BASE = f"{URL}/v1"
BODIES: dict[str, dict[str, Any]] = json.loads(Path(FILE).read_text())
CHAT, WITH_PICTURE = BODIES["chat"]["messages"], BODIES["picture"]["messages"]
SYSTEM, ASKED = (each["content"] for each in CHAT)
[LOOK] = (each["function"] for each in BODIES["call of a tool"]["tools"])
SCHEMA = LOOK["parameters"]
SCORED: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
WANTED = BODIES["JSON schema"]["messages"]
CALLING, CALLED = BODIES["call of a tool"]["messages"], BODIES["result of a tool"]["messages"]
CONTINUED, TOOLS = BODIES["continued answer"]["messages"], BODIES["call of a tool"]["tools"]
URI = WITH_PICTURE[1]["content"][1]["image_url"]["url"]
DATA = URI.partition(",")[2]
OPEN = {"continue_final_message": True, "add_generation_prompt": False}
LIKELIEST: dict[str, Any] = {"temperature": 0, "max_tokens": 100}
SCORE: dict[str, Any] = {"prompt": ASKED, "max_tokens": 2, "temperature": 0, "echo": True}
Features = Mapping[str, Callable[[], Any]]


def body(feature: str) -> dict[str, Any]:
    return {"model": MODEL, **LIKELIEST, **BODIES[feature]}


def calls_of(message: dict[str, Any]) -> list[Any]:
    functions = [each["function"] for each in message.get("tool_calls") or []]
    return [[each["name"], json.loads(each["arguments"])] for each in functions]


def value_of(feature: str, reply: Any) -> Any:
    """Return what a feature is about in a chat completion."""
    reply = reply if isinstance(reply, dict) else reply.model_dump(mode="json")
    choices = reply["choices"]
    message = choices[0]["message"]
    if feature == "call of a tool":
        return calls_of(message)
    if feature == "JSON schema":
        return json.loads(message["content"])
    if feature == "log-probs":
        return [each["logprob"] for each in choices[0]["logprobs"]["content"]]
    if feature == "several answers":
        return len(choices)
    return message["content"]


def chats(create: Callable[..., Any], more: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return the features of a function that takes fields of chat completions. An answer that is
    continued has `more` fields."""

    def of(feature: str) -> Callable[[], Any]:
        given = more if feature == "continued answer" else {}
        return lambda: value_of(feature, create(**body(feature), **given))

    return {feature: of(feature) for feature in BODIES}


def status(call: Callable[[], Any]) -> Any:
    """Return the status of the program's own error for a model, or a route, that is not there."""
    try:
        call()
    except (openai.NotFoundError, anthropic.NotFoundError) as error:
        return error.status_code
    return "no error"


def joined(stream: Any) -> str:
    """Return the text of a stream of chat completions."""
    choices = [choice for each in stream for choice in each.choices]
    return "".join(choice.delta.content or "" for choice in choices)


def responded(stream: Any) -> str:
    """Return the text of a stream of Responses."""
    return "".join(each.delta for each in stream if each.type == "response.output_text.delta")


def scores(reply: Any) -> list[float | None]:
    """Return the log-probs of a completion."""
    return list(reply.choices[0].logprobs.token_logprobs)


def of_http() -> Features:
    client = httpx.Client(base_url=BASE, headers={"Authorization": f"Bearer {KEY}"}, timeout=300)

    def post(route: str, **fields: Any) -> Any:
        reply = client.post(f"/{route}", json=fields)
        if reply.status_code != 200:
            raise ValueError(reply.text)
        return reply.json()

    def chat(**fields: Any) -> Any:
        return post("chat/completions", **fields)

    def whole() -> Any:
        """Return the fields of an answer that both servers have to give alike."""
        reply = chat(**body("chat"))
        [choice] = reply["choices"]
        used = {name: reply["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        return [choice["finish_reason"], choice["message"]["content"], used]

    def score() -> Any:
        [choice] = post("completions", model=MODEL, logprobs=1, **SCORE)["choices"]
        return choice["logprobs"]["token_logprobs"]

    return chats(chat, OPEN) | {
        "usage": whole,
        "scored text": score,
        "token count": lambda: chat(**body("chat"))["usage"]["prompt_tokens"],
        "regular expression": lambda: chat(
            **body("chat"), structured_outputs={"regex": "[a-c]{3}/"}
        )["choices"][0]["message"]["content"],
    }


def of_openai() -> Features:
    client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
    create = client.chat.completions.create
    asked: dict[str, Any] = {"model": MODEL, "instructions": SYSTEM, "input": ASKED}
    asked |= {"temperature": 0, "max_output_tokens": 100}
    function = {"type": "function", **LOOK, "strict": False}
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}

    def called() -> Any:
        held = asked | {"tools": [function], "tool_choice": "required", "input": CALLING[1:]}
        items = [each.to_dict() for each in client.responses.create(**held).output]
        found = [each for each in items if each["type"] == "function_call"]
        return [[each["name"], json.loads(each["arguments"])] for each in found]

    def schema() -> Any:
        held = asked | {"text": form, "input": WANTED[1:]}
        return json.loads(client.responses.create(**held).output_text)

    return chats(create, {"extra_body": OPEN}) | {
        "stream": lambda: joined(create(**body("chat"), stream=True)),
        "Responses": lambda: client.responses.create(**asked).output_text,
        "Responses, stream": lambda: responded(client.responses.create(**asked, stream=True)),
        "Responses, call": called,
        "Responses, JSON schema": schema,
        "scored text": lambda: scores(client.completions.create(model=MODEL, logprobs=1, **SCORE)),
        "no such model": lambda: status(lambda: create(**body("chat") | {"model": "nobody"})),
        "embeddings": lambda: status(lambda: client.embeddings.create(model=MODEL, input="a")),
    }


def of_litellm() -> Features:
    there: dict[str, Any] = {"api_base": BASE, "api_key": KEY, "num_retries": 0}
    name = f"openai/{MODEL}"

    def create(**fields: Any) -> Any:
        return litellm.completion(**fields | {"model": name}, **there)

    def respond(**more: Any) -> Any:
        fields = {"model": name, "instructions": SYSTEM, "input": ASKED, "temperature": 0}
        return litellm.responses(**fields, max_output_tokens=100, **there, **more)

    def score() -> Any:
        given = SCORE | {"model": f"text-completion-{name}", "logprobs": 1}
        return scores(litellm.text_completion(**given, **there))

    unknown = "openai/nobody"
    return chats(create, {"extra_body": OPEN}) | {
        "stream": lambda: joined(create(**body("chat"), stream=True)),
        "Responses": lambda: respond().output[0].content[0].text,
        "Responses, stream": lambda: responded(respond(stream=True)),
        "scored text": score,
        "no such model": lambda: status(
            lambda: litellm.completion(model=unknown, messages=CHAT, **there)
        ),
        "embeddings": lambda: status(lambda: litellm.embedding(model=name, input=["a"], **there)),
    }


def of_langchain() -> Features:
    there: dict[str, Any] = {"base_url": BASE, "api_key": KEY, "max_retries": 0}

    def model(**more: Any) -> ChatOpenAI:
        return ChatOpenAI(**{"model": MODEL, **LIKELIEST, **there, **more})

    def calls() -> Any:
        bound = model().bind_tools(TOOLS, tool_choice="any")
        return [[each["name"], each["args"]] for each in bound.invoke(CALLING).tool_calls]

    def schema() -> Any:
        titled = {"title": "answer", "description": "", **SCHEMA}
        held = model().with_structured_output(titled, method="json_schema", strict=True)
        return held.invoke(WANTED)

    def scored() -> Any:
        reply = model().bind(**SCORED).invoke(CHAT)
        return [each["logprob"] for each in reply.response_metadata["logprobs"]["content"]]

    def several() -> Any:
        drawn = model(temperature=1, seed=5, n=3).generate([convert_to_messages(CHAT)])
        return len(drawn.generations[0])

    vectors = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, **there)
    return {
        "chat": lambda: model().invoke(CHAT).content,
        "stream": lambda: "".join(str(each.content) for each in model().stream(CHAT)),
        "picture": lambda: model().invoke(WITH_PICTURE).content,
        "result of a tool": lambda: model().bind_tools(TOOLS).invoke(CALLED).content,
        "call of a tool": calls,
        "JSON schema": schema,
        "log-probs": scored,
        "several answers": several,
        "continued answer": lambda: model(extra_body=OPEN).invoke(CONTINUED).content,
        "Responses": lambda: model(use_responses_api=True).invoke(CHAT).text,
        "Responses, stream": lambda: "".join(
            each.text for each in model(use_responses_api=True).stream(CHAT)
        ),
        "no such model": lambda: status(lambda: model(model="nobody").invoke(CHAT)),
        "embeddings": lambda: status(lambda: vectors.embed_query("a")),
    }


def of_anthropic() -> Features:
    client = anthropic.Anthropic(base_url=URL, auth_token=KEY, max_retries=0)
    said, calling, wanted, continued = (each[1:] for each in (CHAT, CALLING, WANTED, CONTINUED))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    tools = [{"name": "look", "description": LOOK["description"], "input_schema": SCHEMA}]
    used = {"type": "tool_use", "id": "a", "name": "look", "input": {"side": "left"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "red"}
    head: dict[str, Any] = {"model": MODEL, "system": SYSTEM}
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}

    def given(messages: Any = said, **more: Any) -> dict[str, Any]:
        drawn = {"max_tokens": 100, "extra_body": {"temperature": 0}}
        return {**head, **drawn, "messages": messages, **more}

    def text(*values: Any, **more: Any) -> str:
        reply = client.messages.create(**given(*values, **more))
        return "".join(each.text for each in reply.content if each.type == "text")

    def stream() -> str:
        with client.messages.stream(**given()) as events:
            return "".join(events.text_stream)

    def calls() -> Any:
        forced = {"tools": tools, "tool_choice": {"type": "any"}}
        reply = client.messages.create(**given(calling, **forced))
        return [[each.name, each.input] for each in reply.content if each.type == "tool_use"]

    shown = [{"role": "user", "content": [{"type": "text", "text": ASKED}, image]}]
    called = [*calling, {"role": "assistant", "content": [used]}]
    called.append({"role": "user", "content": [result]})
    return {
        "chat": text,
        "stream": stream,
        "picture": lambda: text(shown),
        "result of a tool": lambda: text(called, tools=tools),
        "call of a tool": calls,
        "JSON schema": lambda: json.loads(text(wanted, output_config=output)),
        "continued answer": lambda: text(continued),
        "token count": lambda: client.messages.count_tokens(**head, messages=said).input_tokens,
        "no such model": lambda: status(
            lambda: client.messages.create(**given() | {"model": "nobody"})
        ),
    }


class _AgentSchema(agents.AgentOutputSchemaBase):
    """The form of an agent's last answer."""

    def is_plain_text(self) -> bool:
        return False

    def name(self) -> str:
        return "answer"

    def json_schema(self) -> dict[str, Any]:
        return SCHEMA

    def is_strict_json_schema(self) -> bool:
        return True

    def validate_json(self, json_str: str) -> Any:
        return json.loads(json_str)


def of_agents() -> Features:
    def agent(api: Any, choice: str | None = None, **more: Any) -> agents.Agent:
        client = openai.AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0)
        settings = agents.ModelSettings(temperature=0, max_tokens=100, tool_choice=choice)
        head = {"name": "a", "instructions": SYSTEM, "model": api(MODEL, client)}
        return agents.Agent(**head, model_settings=settings, **more)

    async def look(_: Any, arguments: str) -> str:
        return str(CALLED[-1]["content"])

    tool = agents.FunctionTool("look", LOOK["description"], SCHEMA, look, strict_json_schema=False)

    def ran(api: Any, asked: Any = CHAT, *values: Any, **more: Any) -> Any:
        return agents.Runner.run_sync(agent(api, *values, **more), asked[1]["content"])

    def looped(api: Any) -> Any:
        """Return the calls of an agent that goes on after their results."""
        result = ran(api, CALLING, "required", tools=[tool])
        assert isinstance(result.final_output, str)
        raw = [each.raw_item for each in result.new_items if each.type == "tool_call_item"]
        return [[each.name, json.loads(each.arguments)] for each in raw]

    async def streamed(api: Any) -> str:
        found = agents.Runner.run_streamed(agent(api), ASKED)
        return responded(
            [each.data async for each in found.stream_events() if hasattr(each, "data")]
        )

    chats, responses = agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel
    return {
        "chat": lambda: ran(chats).final_output,
        "stream": lambda: asyncio.run(streamed(chats)),
        "call of a tool": lambda: looped(chats),
        "JSON schema": lambda: ran(chats, WANTED, output_type=_AgentSchema()).final_output,
        "Responses": lambda: ran(responses).final_output,
        "Responses, stream": lambda: asyncio.run(streamed(responses)),
        "Responses, call": lambda: looped(responses),
        "Responses, JSON schema": lambda: (
            ran(responses, WANTED, output_type=_AgentSchema()).final_output
        ),
    }


def of_llm() -> Features:
    model = Chat(
        *("tiny", KEY, MODEL, BASE), vision=True, supports_schema=True, supports_tools=True
    )
    model.key = KEY

    def text(asked: Any = CHAT, stream: bool = False, **more: Any) -> str:
        given = {"system": SYSTEM, "stream": stream, "key": KEY, **LIKELIEST, **more}
        return model.prompt(asked[1]["content"], **given).text()

    picture = llm.Attachment(type="image/png", content=base64.b64decode(DATA))
    return {
        "chat": text,
        "stream": lambda: text(stream=True),
        "picture": lambda: text(attachments=[picture]),
        "JSON schema": lambda: json.loads(text(WANTED, schema=SCHEMA)),
    }


def of_inspect() -> Features:
    name = f"openai-api/tiny/{MODEL}"
    tool = ToolInfo(name="look", description=LOOK["description"], parameters=SCHEMA)
    parts = [inspect.ContentText(text=ASKED), inspect.ContentImage(image=URI)]

    def replied(asked: Any = ASKED, own: Any = None, given: Any = None, **more: Any) -> Any:
        config = inspect.GenerateConfig(**{**LIKELIEST, "max_retries": 0, **more})
        model = inspect.get_model(name, base_url=BASE, api_key=KEY, memoize=False, **(own or {}))
        messages = [
            inspect.ChatMessageSystem(content=SYSTEM),
            inspect.ChatMessageUser(content=asked),
        ]
        return asyncio.run(model.generate(messages, config=config, **(given or {})))

    def called() -> Any:
        given = {"tools": [tool], "tool_choice": "any"}
        found = replied(CALLING[1]["content"], given=given).message.tool_calls or []
        return [[each.function, each.arguments] for each in found]

    def schema() -> Any:
        held = {"name": "answer", "json_schema": SCHEMA, "strict": True}
        return json.loads(replied(WANTED[1]["content"], response_schema=held).completion)

    return {
        "chat": lambda: replied().completion,
        "picture": lambda: replied(parts).completion,
        "call of a tool": called,
        "JSON schema": schema,
        "log-probs": lambda: [
            each.logprob for each in replied(**SCORED).choices[0].logprobs.content
        ],
        "several answers": lambda: len(replied(temperature=1, seed=5, num_choices=3).choices),
        "Responses": lambda: replied(own={"responses_api": True}).completion,
    }


PROGRAMS = {
    "HTTP": of_http,
    "openai": of_openai,
    "anthropic": of_anthropic,
    "litellm": of_litellm,
    "langchain": of_langchain,
    "openai-agents": of_agents,
    "inspect-ai": of_inspect,
    "llm": of_llm,
}


def tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


found = {
    program: {feature: tried(call) for feature, call in make().items()}
    for program, make in PROGRAMS.items()
}
print(json.dumps(found))
