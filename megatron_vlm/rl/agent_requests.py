"""Requests of agents, answered by the routes of the service.

Each episode has an address of its own. A request is rendered, drawn and answered as the service
does it. The engine's tokens become a part of the segment that the prompt continues, or of a new
one.
"""

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

from fastapi import APIRouter, FastAPI, Request

from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.sampler import SamplerError
from megatron_vlm.errors import DataError, MegatronVLMError
from megatron_vlm.rl.agent_program import reward_of
from megatron_vlm.rl.completion_requests import CompletionQueue
from megatron_vlm.rl.episode import Episode
from megatron_vlm.serve.http.app import LoopbackOnly, add_chat_routes, error_at
from megatron_vlm.serve.http.chat_routing import route_with
from megatron_vlm.serve.http.chat_samples import ChatSamples, ChatTexts, DrawnAnswers
from megatron_vlm.serve.http.context import AnyFront, Front, Key, ServerFacts, request_key
from megatron_vlm.serve.http.openai_routes import error_body
from megatron_vlm.serve.http.request_bodies import Bodies, HttpError, RequestLimits, add_handlers
from megatron_vlm.serve.journal.journal_records import Call
from megatron_vlm.serve.protocol.payloads import RequestError, Samples
from megatron_vlm.serve.requests_as_rows import RowReader
from megatron_vlm.serve.sample_calls import SampleAsk, SampleBounds, StopWords, as_sampled, read_ask
from megatron_vlm.user_code.environment import EnvStep
from megatron_vlm.user_code.reward_child import WrongResultError

MODEL = "policy"  # name of the model for agents
_POLL_S = 1.0  # how often the connection of a waiting program is checked
Name = tuple[str, int]  # digest of a request, and its number among those that are the same


@dataclass(eq=False)
class AgentEpisode:
    """An episode that asks for its answers. Its coroutines run in the loop of the engines."""

    episode: Episode
    queue: CompletionQueue
    turns: int  # maximum answers
    seed_of: Callable[[str], int]  # seed of a request
    learn: Callable[[Row, Completion], None]  # adds an answer to the episode
    reader: RowReader  # shared by the episodes of its group
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    asked: int = 0  # answers that were asked for
    # What the program has posted, or the error of the engine, which ends the run.
    reward: "Future[EnvStep]" = field(default_factory=Future)
    has_ended: bool = False
    draws: dict[Name, "asyncio.Task[list[Completion]]"] = field(default_factory=dict)
    held: set[Name] = field(default_factory=set)  # draws that have a reader, or were read
    learnt: dict[Name, DrawnAnswers] = field(default_factory=dict)  # draws in the episode

    async def draw(self, ask: SampleAsk, digest: str, is_retry: bool) -> list[Completion]:
        """Return the answers to a request, which are in the episode from now on. Where the program
        has closed the connection before, the same request gets the same draw."""
        number = next(n for n in count() if (digest, n) not in self.held)
        name = digest, number - 1 if is_retry and number else number
        if name not in self.draws:
            if self.reward.done() or self.asked + ask.n > self.turns:
                raise self.refusal()
            self.asked += ask.n
            self.draws[name] = asyncio.create_task(self._ask(ask, name))
            # Nobody may wait for it any more, and then its error is of no interest.
            self.draws[name].add_done_callback(lambda task: task.cancelled() or task.exception())
        self.held.add(name)
        try:
            completions = await asyncio.shield(self.draws[name])
        except BaseException:
            self.held.discard(name)
            raise
        if self.has_ended:
            raise HttpError(499, "the client has closed its connection")
        if name not in self.learnt:
            ids = ask.prompt.ids_S.tolist()
            self.learnt[name] = [(ids, each.ids) for each in completions]
            try:
                for each in completions:
                    self.learn(ask.prompt, each)
            except DataError as error:
                raise self._end_run(error) from error
        return completions

    def _end_run(self, error: MegatronVLMError) -> HttpError:
        """End the run with an error of the engine, whose words are not for programs."""
        with suppress(InvalidStateError):  # the episode has its reward
            self.reward.set_exception(error)
        return HttpError(500, "the engine has failed")

    def refusal(self) -> HttpError:
        """Return the error of a request after the last one."""
        if self.reward.done():
            return HttpError(410, "this episode has its reward, and gets no more answers")
        return HttpError(403, f"this episode has had its {self.turns} answers (rl.turns)")

    async def _ask(self, ask: SampleAsk, name: Name) -> list[Completion]:
        run, prompt = self.queue.settings, ask.prompt
        if (segment := self.episode.segment_of(prompt)) is not None:
            prompt = replace(prompt, routing_SLK=segment.shown_routing(len(prompt.ids_S)))
        settings = replace(
            ask.settings,
            max_tokens=min(ask.settings.max_tokens, run.max_tokens),
            min_tokens=min(ask.settings.min_tokens, run.max_tokens),
            temperature=run.temperature,
            top_k=run.top_k,
            top_p=run.top_p,
            tempered=False,
        )
        seed, number = self.seed_of("{} {}".format(*name)), self.episode.number
        asking = (
            self.queue.ask(prompt, seed + place, ask.n, number, settings) for place in range(ask.n)
        )
        try:
            return await asyncio.gather(*asking)
        except SamplerError as error:
            raise self._end_run(error) from error


class AgentRequests:
    """The ChatSource of agents. A key is the name of an episode in its address."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, stops: StopWords, bounds: SampleBounds
    ) -> None:
        self.loop, self.stops, self.bounds = loop, stops, bounds
        self.open: dict[str, AgentEpisode] = {}

    def of(self, key: str) -> AgentEpisode:
        """Return an episode in progress."""
        if (found := self.open.get(key)) is None:
            raise HttpError(410, "this episode has ended, or was never there")
        return found

    async def place(self, key: str, model: str) -> tuple[str, int]:
        self.check_model(key, model)
        return MODEL, 0  # so that the same request has the same body

    async def accept(self, call: Call, streamed: int) -> Call:
        episode = self.of(call.key)
        if episode.asked >= episode.turns and not episode.held < episode.draws.keys():
            raise episode.refusal()
        ask = await asyncio.to_thread(
            read_ask, call.body, episode.reader, self.stops, 0, self.bounds
        )
        if ask.prompt_log_probs or ask.top_prompt or ask.top_sample:
            raise RequestError(
                "is not supported while a model learns",
                key="top_logprobs" if ask.top_sample else "echo",
                remedy="leave it out; logprobs of the answer alone are returned",
            )
        return replace(call, parsed=(ask, hashlib.sha256(call.body).hexdigest()), body=b"")

    async def follow(
        self, request: Request, call: Call
    ) -> AsyncIterator[Samples | Sequence[Sequence[int]]]:
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        ask, digest = call.parsed
        work = self.of(call.key).draw(ask, digest, is_retry)
        drawing = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
        try:
            while not (await asyncio.wait([drawing], timeout=_POLL_S))[0]:
                if await request.is_disconnected():
                    raise HttpError(499, "the client has closed its connection")
                yield ()
            completions = drawing.result()
        finally:
            drawing.cancel()
        yield Samples(as_sampled(completions, [None] * len(completions)))

    async def drop(self, call: Call) -> None:
        """Do nothing: nobody keeps a request, and its draw stays for a retry."""

    def drawn(self, key: str) -> DrawnAnswers:
        return [each for drawn in tuple(self.of(key).learnt.values()) for each in drawn]

    def check_model(self, key: str, model: str) -> None:
        if model != MODEL:
            text = f"model: there is no {model[:200]!r}: an agent asks for {MODEL}"
            raise HttpError(404, text, param="model", code="model_not_found")

    def models(self, key: str) -> dict[str, tuple[str, float]]:
        return {MODEL: ("megatron_vlm", 0.0)}


async def _key(request: Request) -> str:
    """Return the name of the episode that an address belongs to. It must be in progress."""
    requests: AgentRequests = request.app.state.chats.source
    return requests.of(request.path_params["episode"]).id


_router = APIRouter(route_class=route_with(error_body))


@_router.post("/e/{episode}/reward")
async def post_reward(request: Request, context: AnyFront, key: Key) -> dict[str, float]:
    """Take the reward of an episode: a number, or an object with `reward` and more figures."""
    episode = request.app.state.chats.source.of(key)
    try:
        step = reward_of(json.loads(await context.body(request)))
    except (ValueError, RecursionError, WrongResultError) as error:
        raise HttpError(400, f"reward: {error}") from error
    try:
        episode.reward.set_result(step)
    except InvalidStateError:
        raise HttpError(
            409, "reward: this episode has its reward, and the first one counts"
        ) from None
    return {"reward": step.reward}


def agent_app(
    requests: AgentRequests, texts: ChatTexts, limits: RequestLimits, facts: ServerFacts
) -> FastAPI:
    """Build the HTTP application that agents ask."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.context = context = Front(limits, None, facts, Bodies(limits))
    app.state.chats = ChatSamples(context, texts, requests.bounds.longest, requests)
    add_handlers(app, error_at)
    openai = "/e/{episode}/v1"
    add_chat_routes(app, [openai], [openai, "/e/{episode}/anthropic/v1"])
    app.include_router(_router)
    app.dependency_overrides[request_key] = _key
    app.add_middleware(LoopbackOnly)
    return app
