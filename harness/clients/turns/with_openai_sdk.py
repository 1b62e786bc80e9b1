"""The OpenAI SDK: `with_openai_sdk.py URL plain|streamed|tool` prints the model's reply.

The mode `tool` streams both replies.
"""

import json
import pathlib
import sys

from openai import OpenAI

url, mode = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FUNCTION = {"name": "read_note", "description": "Reads a note", "parameters": NAME}
TOOL = {"type": "function", "function": FUNCTION}


def streamed(messages, **fields):
    with client.chat.completions.stream(model="hearth", messages=messages, **fields) as stream:
        return stream.get_final_completion().choices[0].message


if mode == "tool":
    messages = [{"role": "user", "content": "Please read the note with name note"}]
    reply = streamed(messages, tools=[TOOL])
    messages.append(reply.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in reply.tool_calls or []:
        result = pathlib.Path(json.loads(call.function.arguments)["name"]).read_text()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(streamed(messages, tools=[TOOL]).content)
else:
    messages = [{"role": "user", "content": "Say hello."}]
    if mode == "streamed":
        print(streamed(messages).content)
    else:
        print(client.chat.completions.create(model="hearth", messages=messages).choices[0].message.content)
