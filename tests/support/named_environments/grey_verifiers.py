"""An environment of verifiers with pictures, two turns and a harness of its own. It rewards the
length of the last answer, and counts the turns."""

import httpx
import verifiers.v1 as vf
from grey_pictures import grey_png
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult


def say(text, *greys):
    url = f"data:image/png;base64,{grey_png(*greys)}"
    return vf.UserMessage(
        content=[{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    )


class GreyData(vf.TaskData):
    grey: int


class GreyTask(vf.Task[GreyData]):
    pass


class GreyTaskset(vf.Taskset[GreyTask, vf.TasksetConfig]):
    def load(self):
        for grey in (0, 64, 128, 255):
            yield GreyTask(GreyData(grey=grey, prompt=[say("Which?", grey)]), self.config.task)


class GreyConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GreyEnv(vf.Env[GreyConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            last = await interaction.turn([say("Look again.", task.data.grey, 0)])
        interaction.trace.record_reward("length", len(last.last_reply) % 5, 1.0)
        interaction.trace.record_metric("grey", task.data.grey)


class Chat(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [message_to_wire(each) for each in prompt]}
        head = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None) as http:
            reply = await http.post(f"{endpoint}/chat/completions", json=body, headers=head)
        failed = reply.status_code != 200
        return ProgramResult(int(failed), "", reply.text * failed)


__all__ = ["Chat", "GreyEnv", "GreyTaskset"]
