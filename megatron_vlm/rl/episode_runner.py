"""Runner of episodes on rank 0, which requests answers and passes them to rewards or environments.

Each episode is a coroutine, and a CompletionQueue provides its answers.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from transformers import PreTrainedTokenizerBase

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet, Handle
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.spec import TextSizes
from megatron_vlm.rl.agent_program import record_for_agent
from megatron_vlm.rl.agent_requests import AgentEpisode
from megatron_vlm.rl.agent_server import AgentServer
from megatron_vlm.rl.completion_requests import CompletionQueue
from megatron_vlm.rl.episode import Episode, Group
from megatron_vlm.rl.reward_model import ModelRewards
from megatron_vlm.rl.turn_tokens import TurnEncoder
from megatron_vlm.training.expert_routing import check_table
from megatron_vlm.user_code.environment import EnvStep, Opening
from megatron_vlm.user_code.pool import RewardPool


@dataclass
class EpisodeRunner:
    """Runner of episodes: the prompts, the rewards, and the settings of sampling."""

    cfg: Config
    data: DataSet
    reward_pool: RewardPool
    views: RewardPool | None = None  # processes of teacher.view
    skipped: list[DataError] = field(default_factory=list)  # errors of skipped prompts
    begun: int = 0  # number of episodes so far
    agents: AgentServer | None = None  # set where rl.agent is
    reward_model: ModelRewards | None = None  # set where rl.reward names one

    @cached_property
    def dialogues(self) -> list[TurnEncoder]:
        """Turn encoders of the sources. Each source has its own, because of its image folder."""
        return [TurnEncoder(reader) for reader in self.data.readers]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.data.readers[0].encoder.renderer.tokenizer

    @cached_property
    def text_sizes(self) -> TextSizes:
        return read_sizes(self.cfg.model.path).text

    @cached_property
    def settings(self) -> SamplingSettings:
        """Sampling settings of the answers."""
        rl, end_ids = self.cfg.rl, self.data.readers[0].encoder.renderer.end_ids
        distribution = rl.temperature, rl.top_k, rl.top_p
        return SamplingSettings(rl.max_new_tokens, *distribution, stop_ids=end_ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer for rewards and environments."""
        renderer = self.data.readers[0].encoder.renderer
        return renderer.answer_text(self.settings.without_stop(ids))

    def words(self, row: Row) -> str:
        """Return the readable text of a row that was shown to the model. Several turns begin with
        their roles."""
        renderer = self.data.readers[0].encoder.renderer
        text = self.tokenizer.decode(row.ids_S.tolist(), skip_special_tokens=False)
        text = str(text).removesuffix(renderer.template.opening)
        # The first line of each turn is its role.
        parts = [turn.partition("\n") for turn in text.split(renderer.chat_format.opens)[1:]]
        turns = [(role, renderer.special.sub("", words).strip()) for role, _, words in parts]
        turns = [(role, words) for role, words in turns if words]
        if len(turns) == 1:
            return turns[0][1]
        return "\n".join(f"{role}: {words}" for role, words in turns)

    async def play(
        self, queue: CompletionQueue, handles: Sequence[Handle], step: int, first_group: int
    ) -> list[Group]:
        """Run the episodes of these prompts, and return their groups. A prompt that cannot be read
        raises an error or is skipped, depending on data.max_errors."""
        reading = [asyncio.to_thread(self._read, handle) for handle in handles]
        rows = await asyncio.gather(*reading)
        playing = [
            (self._group(handle, row, first_group + place), row, self.dialogues[handle[0]])
            for place, (handle, row) in enumerate(zip(handles, rows, strict=True))
            if row is not None
        ]
        if self.agents is not None:
            queue.places = self.cfg.rl.max_concurrent
        queue.playing += sum(len(group.episodes) for group, _, _ in playing)
        tasks = [asyncio.create_task(self._play_group(queue, *each, step)) for each in playing]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [group for group, _, _ in playing]

    def _read(self, handle: Handle) -> Row | None:
        try:
            return self.data.row(handle)
        except DataError as error:
            if not self.cfg.data.max_errors:
                raise
            self.skipped.append(DataError(**error.fields()))  # a copy that keeps no record alive
            return None

    def _group(self, handle: Handle, row: Row, number: int) -> Group:
        where, record = self.data.where(handle), self.data.raw(handle)
        first, self.begun = self.begun, self.begun + self.cfg.rl.samples
        episodes = [
            Episode(first + place, number, place, where, record)
            for place in range(self.cfg.rl.samples)
        ]
        return Group(self.words(row), episodes, handle[0])

    async def _play_group(
        self, queue: CompletionQueue, group: Group, row: Row, dialogue: TurnEncoder, step: int
    ) -> None:
        if self.agents is not None:
            await self._play_agents(queue, group, row, dialogue, step)
            return
        episodes = group.episodes
        beginning = [
            self.reward_pool.begin(each.number, each.record, each.where) for each in episodes
        ]
        firsts = await asyncio.gather(*map(asyncio.wrap_future, beginning))
        view, teacher_opening = await self._view(episodes[0], dialogue)
        for episode, first in zip(episodes, firsts, strict=True):
            episode.teacher_view, episode.teacher_opening = view, teacher_opening
            where = f"{episode.where}: what rl.environment says first"
            if first is not None:
                episode.opening = first.messages
                episode.take(first)
            said = episode.opening
            episode.begin(row if said is None else dialogue.opening(said, where, episode.record))
        same_opening = firsts.count(None)
        sharers = [same_opening if first is None else 1 for first in firsts]
        playing = [
            self._play_episode(queue, episode, dialogue, step, count)
            for episode, count in zip(episodes, sharers, strict=True)
        ]
        await asyncio.gather(*playing)
        if self.reward_model is not None:
            await self.reward_model.rate(episodes, dialogue.prompts)

    async def _play_agents(
        self, queue: CompletionQueue, group: Group, row: Row, dialogue: TurnEncoder, step: int
    ) -> None:
        """Run the episodes of a prompt whose program owns the loop."""
        agents, first, rl = self.agents, group.episodes[0], self.cfg.rl
        assert agents is not None
        shown = dialogue.prompts, first.record, first.where
        # A harness knows its tasks.
        read = bytes if rl.has_harness else partial(record_for_agent, *shown)
        given = asyncio.ensure_future(asyncio.to_thread(read))
        reader = agents.rows.for_episodes()

        async def play(episode: Episode) -> None:
            def rate(answer: str) -> asyncio.Future[EnvStep]:
                return asyncio.wrap_future(self.reward_pool.step(episode.number, answer))

            seed_of_request = partial(seed_of, self.cfg.train.seed, step, episode)
            learn = partial(self._add_request, episode)
            asking = AgentEpisode(episode, queue, rl.turns, seed_of_request, learn, reader)
            episode.shown.append(row)
            # Nothing is awaited before, so that episodes start in their order.
            async with agents.places:
                begun = self.reward_pool.begin(episode.number, episode.record, episode.where)
                await asyncio.wrap_future(begun)
                await agents.play(asking, await given, rate)
            self.reward_pool.end(episode.number)
            await queue.leave(episode.number)

        await asyncio.gather(*map(play, group.episodes))

    async def _view(self, episode: Episode, dialogue: TurnEncoder) -> tuple[Opening, Row | None]:
        """Return what a teacher sees in place of the messages of this record, if it has a view."""
        where = f"{episode.where}: what teacher.view returns"
        view = None
        if self.views is not None:
            view = await asyncio.wrap_future(self.views.view(episode.record, episode.where))
        if view is None:
            return None, None
        return view, await asyncio.to_thread(dialogue.view, view, where, episode.record)

    async def _play_episode(
        self,
        queue: CompletionQueue,
        episode: Episode,
        dialogue: TurnEncoder,
        step: int,
        sharers: int,
    ) -> None:
        """Run an episode until the environment returns no messages, or a limit is reached."""
        rl = self.cfg.rl
        for turn in range(rl.turns):
            seed = seed_of(self.cfg.train.seed, step, episode, turn)
            prompt, count = episode.prompt(), 1 if turn else sharers
            answer = await queue.ask(prompt, seed, count, episode.number)
            self._check_routing(episode, len(episode.segments[-1].ids), answer)
            text = self.text(answer.ids)
            episode.said.append(dialogue.answer(episode.segments[-1].ids, text))
            episode.add_completion(answer, text)
            response = await asyncio.wrap_future(
                self.reward_pool.step(episode.number, episode.answers[-1])
            )
            episode.take(response)
            if not response.messages:
                break
            if not await asyncio.to_thread(self._go_on, episode, dialogue, response, turn):
                episode.cut = True
                break
        self.reward_pool.end(episode.number)
        await queue.leave(episode.number)

    def _add_request(self, episode: Episode, prompt: Row, answer: Completion) -> None:
        """Add an agent's request with its answer to its episode."""
        self._check_routing(episode, len(prompt.ids_S), answer)
        episode.add_request(prompt, answer, self.text(answer.ids))

    def _check_routing(self, episode: Episode, prompt: int, answer: Completion) -> None:
        """Refuse experts of an engine that the model does not have."""
        if not self.cfg.rl.replay_routing:
            return
        where = f"{episode.where}: the engine's answer {len(episode.answers) + 1}"
        if answer.routing_SLK is None:
            raise DataError(
                "is missing", place=where, key="routing", remedy="set rl.replay_routing=false"
            )
        tokens = prompt + len(answer.ids)
        check_table(answer.routing_SLK, tokens, self.text_sizes, where)

    def _go_on(self, episode: Episode, dialogue: TurnEncoder, response: EnvStep, turn: int) -> bool:
        """Show the environment's messages. Return whether the next answer is within the limits."""
        rl, messages = self.cfg.rl, response.messages
        where = f"{episode.where}: what rl.environment says after answer {turn + 1}"
        if response.is_new:
            row = dialogue.opening(messages, where, episode.record)
            fits = turn + 1 < rl.turns and len(row.ids_S) + rl.max_new_tokens <= rl.max_tokens
            if fits:
                episode.begin_again(messages, row)
            return fits
        said = dialogue.parse_reply(messages, where)
        reply, is_same = dialogue.reply(messages, where, episode.record)
        is_continued = is_same and response.tools is None
        if turn + 1 == rl.turns:
            return False
        episode.said += said
        if is_continued:
            length = len(episode.segments[-1].ids) + len(reply.ids_S) + 1
        else:
            shown = [*episode.shown[episode.first :], reply]
            ids = _conversation(episode, dialogue, episode.opening, shown, where)
            length = len(ids)
        if length + rl.max_new_tokens > rl.max_tokens:
            return False
        if is_continued:
            episode.add_observation(reply, dialogue.end_id)
        else:
            episode.shown.append(reply)
            teacher_ids = None
            if (opening := episode.teacher_opening) is not None:
                seen = [opening, *episode.shown[1:]]
                view = _conversation(episode, dialogue, episode.teacher_view, seen, where)
                teacher_ids = torch.tensor(view)
            episode.begin_segment(ids, teacher_ids)
        return True


def _conversation(
    episode: Episode, dialogue: TurnEncoder, opening: Opening, shown: Sequence[Row], where: str
) -> list[int]:
    """Return the tokens of the whole conversation so far after this opening, as the chat template
    shows it now."""
    chat = dialogue.parse_opening(opening, episode.where, episode.record)
    return dialogue.conversation(chat, episode.said, shown, where)


def seed_of(seed: int, step: int, episode: Episode, turn: int | str) -> int:
    """Return the seed of an answer, below 2**62. In the first turn, the next episode of the same
    prompt has the next number. `turn`: its number, or the name of an agent's request."""
    own_place = () if turn == 0 else (episode.place,)
    text = " ".join(map(str, (seed, step, episode.group, turn, *own_place)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 3) + (episode.place if turn == 0 else 0)
