"""The Anthropic SDK: `with_anthropic_sdk.py URL plain|streamed|tool` prints what the model wrote; `tool` streams both of its answers."""

import pathlib
import sys

from anthropic import Anthropic

url, mode = sys.argv[1:]
client = Anthropic(base_url=url, api_key="none", max_retries=0)
fixed = {"model": "hearth", "max_tokens": 1024}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = {"name": "read_note", "description": "Reads a note", "input_schema": NAME}


def streamed(messages, **more):
    with client.messages.stream(messages=messages, **fixed, **more) as stream:
        return stream.get_final_message()


def said(message):
    return "".join(block.text for block in message.content if block.type == "text")


if mode == "tool":
    messages = [{"role": "user", "content": "Please read the note with name note"}]
    answer = streamed(messages, tools=[TOOL])
    messages.append({"role": "assistant", "content": answer.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": pathlib.Path(block.input["name"]).read_text()}
        for block in answer.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results or "Go on."})
    print(said(streamed(messages, tools=[TOOL])))
else:
    messages = [{"role": "user", "content": "Say hello."}]
    print(said(streamed(messages) if mode == "streamed" else client.messages.create(messages=messages, **fixed)))
