"""Pydantic AI: `with_pydantic_ai.py URL plain|streamed|tool` prints the model's reply.

Each mode runs with chat completions, with Responses and with messages. The mode `plain` also requests an
object of a type: as a JSON schema, or for messages through an output tool.
"""

import asyncio
import pathlib
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, mode = sys.argv[1:]
openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
models = [
    OpenAIChatModel("hearth", provider=openai),
    OpenAIResponsesModel("hearth", provider=openai),
    AnthropicModel("hearth", provider=AnthropicProvider(base_url=url, api_key="none")),
]
SETTINGS = {"max_tokens": 1024}


class Answer(BaseModel):
    """A short answer"""

    word: Literal["hello", "goodbye"]


def read_note(name: str) -> str:
    """Reads a note"""
    return pathlib.Path(name).read_text()


async def streamed(agent, prompt):
    async with agent.run_stream(prompt) as reply:
        print("".join([part async for part in reply.stream_text(delta=True)]))
    return reply


async def main():
    for model in models:
        if mode == "plain":
            agent = Agent(model, model_settings=SETTINGS)
            print((await agent.run("Say hello.")).output)
            typed = Answer if isinstance(model, AnthropicModel) else NativeOutput(Answer)
            agent = Agent(model, output_type=typed, model_settings=SETTINGS)
            print((await agent.run("Say hello.")).output.word)
        elif mode == "streamed":
            await streamed(Agent(model, model_settings=SETTINGS), "Say hello.")
        else:
            agent = Agent(model, tools=[read_note], model_settings=SETTINGS)
            reply = await streamed(agent, "Please read the note with name note")
            parts = [part for message in reply.all_messages() for part in message.parts]
            assert any(isinstance(part, ToolReturnPart) for part in parts), parts


asyncio.run(main())
