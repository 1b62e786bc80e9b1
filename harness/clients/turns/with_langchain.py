"""LangChain: `with_langchain.py URL plain|streamed|tool` prints the model's reply.

Each mode runs with chat completions, with Responses and with messages; `tool` runs an agent of LangChain.
"""

import pathlib
import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, mode = sys.argv[1:]
openai = {"model": "hearth", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
streaming = mode != "plain"
models = [
    ChatOpenAI(**openai, streaming=streaming, stream_usage=streaming),
    ChatOpenAI(**openai, streaming=streaming, use_responses_api=True),
    ChatAnthropic(
        model="hearth", base_url=url, api_key="none", max_retries=0, max_tokens=1024, streaming=streaming
    ),
]


@tool
def read_note(name: str) -> str:
    """Reads a note"""
    return pathlib.Path(name).read_text()


for model in models:
    if mode == "plain":
        print(model.invoke("Say hello.").text)
    elif mode == "streamed":
        print("".join(part.text for part in model.stream("Say hello.")))
    else:
        agent = create_agent(model, [read_note])
        prompt = {"role": "user", "content": "Please read the note with name note"}
        messages = agent.invoke({"messages": [prompt]})["messages"]
        assert any(message.type == "tool" for message in messages), messages
        print(messages[-1].text)
