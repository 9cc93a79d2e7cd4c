"""Server of agents on rank 0, and the episodes that their programs play at it."""

import asyncio
from collections.abc import Callable

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.engines.engine_kinds import engine_kind
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.hub import folder_of
from megatron_vlm.rl.agent_program import AgentError, printed_reward, run_agent
from megatron_vlm.rl.agent_requests import MODEL, AgentEpisode, AgentRequests, agent_app
from megatron_vlm.serve.chat_texts import TokenizerTexts
from megatron_vlm.serve.http.context import ServerFacts
from megatron_vlm.serve.http.http_server import FrontServer
from megatron_vlm.serve.http.request_bodies import RequestLimits
from megatron_vlm.serve.requests_as_rows import RowReader
from megatron_vlm.serve.sample_calls import SampleBounds
from megatron_vlm.user_code.environment import EnvStep
from megatron_vlm.user_code.reward_child import WrongResultError
from megatron_vlm.version import __version__

# Returns the reward of an answer to this episode's record, if there is such a function, or that of
# the harness that asks at an address.
Rate = Callable[[str], "asyncio.Future[EnvStep]"]


class AgentServer:
    """HTTP server that all agents of a run ask, each at the address of its episode."""

    def __init__(
        self, cfg: Config, sizes: ModelSizes, pictures: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """`pictures`: maximum pictures of a row. `loop`: the event loop of the episodes."""
        self.rl, self.agent = cfg.rl, cfg.rl.agent or ""
        self.places = asyncio.Semaphore(cfg.rl.max_concurrent)
        self.limits = RequestLimits(pictures=pictures)
        texts = TokenizerTexts(cfg, sizes, self.limits.pixels)
        longest = min(cfg.rl.max_tokens, sizes.text.max_positions)
        bounds = SampleBounds(cfg.rl.max_new_tokens, longest, "this run (rl.max_tokens)")
        self.requests = AgentRequests(loop, texts.stops, bounds)
        self.rows = RowReader(cfg, str(folder_of(cfg.model.path)), sizes, self.limits.pixels)
        kind = engine_kind(cfg.engine.name)
        facts = ServerFacts(
            *((MODEL,), longest, MODEL, MODEL, __version__, None, "", sizes.text.vocab),
            *(kind.has_grammars, kind.has_penalties, True),
        )
        self.server = FrontServer(agent_app(self.requests, texts, self.limits, facts))
        self.port = self.server.start()
        self.told: set[str] = set()  # failures that were printed

    async def play(self, asking: AgentEpisode, given: bytes, rate: Rate) -> None:
        """Run the program for an episode, with this record, until it ends. A failure costs the
        episode where rl.failed_reward is set, and otherwise raises an error that names the
        record."""
        episode = asking.episode
        try:
            step = await self._run(asking, given, rate)
        except AgentError as error:
            failed = DataError(
                str(error),
                place=episode.where,
                key="rl.agent",
                found=self.agent,
                remedy="mend it, or set rl.failed_reward=0 to give such episodes this reward",
            )
            if self.rl.failed_reward is None:
                raise failed from None
            if str(error) not in self.told:
                self.told.add(str(error))
                print_to_user(f"an episode has failed: {failed}")
            step = EnvStep(self.rl.failed_reward, (), {"failed": 1.0})
        episode.take(step)

    async def _run(self, asking: AgentEpisode, given: bytes, rate: Rate) -> EnvStep:
        """Return the reward: what was posted, or else printed, or else what rl.reward returns."""
        base, output = f"http://127.0.0.1:{self.port}/e/{asking.id}", ""
        step: EnvStep | None = None
        told = {"REWARD_URL": f"{base}/reward"}
        for api, path in (("OPENAI", "/v1"), ("ANTHROPIC", "/anthropic")):
            told |= {f"{api}_BASE_URL": base + path, f"{api}_API_KEY": asking.id}
            told |= {f"{api}_MODEL": MODEL}
        self.requests.open[asking.id] = asking
        try:
            if self.rl.has_harness:
                step = await rate(told["OPENAI_BASE_URL"])
            else:
                more = told, self.rl.agent_timeout, asking.reward
                output = await run_agent(self.agent, given, *more)
        except (AgentError, DataError):
            if not asking.reward.done():
                raise
        finally:
            del self.requests.open[asking.id]
            asking.has_ended = True
        if asking.reward.done():
            return asking.reward.result()
        if step is not None:
            return step
        try:
            if (printed := printed_reward(output)) is not None:
                return printed
        except WrongResultError as error:
            raise AgentError(f"printed a reward, and {error}") from None
        if self.rl.reward is not None:
            return await rate((asking.episode.answers or [""])[-1])
        raise AgentError(
            'gave no reward: post one to REWARD_URL, print {"reward": NUMBER} as its last line, or '
            "set rl.reward"
        )

    def close(self) -> None:
        """End the server."""
        self.server.stop()
