"""The OpenAI SDK: `with_openai_sdk.py URL plain|streamed|tool` prints what the model wrote; `tool` streams both of its answers."""

import json
import pathlib
import sys

from openai import OpenAI

url, mode = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "read_note", "description": "Reads a note", "parameters": NAME}}


def streamed(messages, **more):
    with client.chat.completions.stream(model="hearth", messages=messages, **more) as stream:
        return stream.get_final_completion().choices[0].message


if mode == "tool":
    messages = [{"role": "user", "content": "Please read the note with name note"}]
    answer = streamed(messages, tools=[TOOL])
    messages.append(answer.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in answer.tool_calls or []:
        result = pathlib.Path(json.loads(call.function.arguments)["name"]).read_text()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(streamed(messages, tools=[TOOL]).content)
else:
    messages = [{"role": "user", "content": "Say hello."}]
    if mode == "streamed":
        print(streamed(messages).content)
    else:
        print(client.chat.completions.create(model="hearth", messages=messages).choices[0].message.content)
