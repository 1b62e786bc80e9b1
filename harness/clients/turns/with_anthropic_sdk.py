"""The Anthropic SDK: `with_anthropic_sdk.py URL plain|streamed|tool` prints the model's reply.

The mode `tool` streams both replies.
"""

import pathlib
import sys

from anthropic import Anthropic

url, mode = sys.argv[1:]
client = Anthropic(base_url=url, api_key="none", max_retries=0)
fixed = {"model": "hearth", "max_tokens": 1024}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = {"name": "read_note", "description": "Reads a note", "input_schema": NAME}


def streamed(messages, **fields):
    with client.messages.stream(messages=messages, **fixed, **fields) as stream:
        return stream.get_final_message()


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


if mode == "tool":
    messages = [{"role": "user", "content": "Please read the note with name note"}]
    reply = streamed(messages, tools=[TOOL])
    messages.append({"role": "assistant", "content": reply.content})
    results = []
    for block in reply.content:
        if block.type == "tool_use":
            result = pathlib.Path(block.input["name"]).read_text()
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
    messages.append({"role": "user", "content": results or "Go on."})
    print(text(streamed(messages, tools=[TOOL])))
else:
    messages = [{"role": "user", "content": "Say hello."}]
    if mode == "streamed":
        print(text(streamed(messages)))
    else:
        print(text(client.messages.create(messages=messages, **fixed)))
