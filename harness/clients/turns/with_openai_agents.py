"""OpenAI's Agents SDK: `with_openai_agents.py URL plain|streamed|tool` prints the model's reply.

Each mode runs with chat completions and with Responses; `tool` streams.
"""

import asyncio
import pathlib
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

url, mode = sys.argv[1:]
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
set_tracing_disabled(True)


@function_tool
def read_note(name: str) -> str:
    """Reads a note"""
    return pathlib.Path(name).read_text()


async def main():
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="hearth", openai_client=client)
        settings = ModelSettings(max_tokens=1024, include_usage=True)
        tools = [read_note] if mode == "tool" else []
        agent = Agent(name="Reader", model=model, model_settings=settings, tools=tools)
        prompt = "Please read the note with name note" if mode == "tool" else "Say hello."
        if mode == "plain":
            reply = await Runner.run(agent, prompt)
        else:
            reply = Runner.run_streamed(agent, prompt)
            async for _ in reply.stream_events():
                pass
        if mode == "tool":
            items = [item.type for item in reply.new_items]
            assert "tool_call_output_item" in items, items
        print(reply.final_output)


asyncio.run(main())
