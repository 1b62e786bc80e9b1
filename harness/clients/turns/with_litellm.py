"""LiteLLM's library: `with_litellm.py URL plain|streamed|tool` prints the model's reply."""

import json
import os
import pathlib
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

url, mode = sys.argv[1:]
fixed = {"model": "openai/hearth", "api_base": f"{url}/v1", "api_key": "none"}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FUNCTION = {"name": "read_note", "description": "Reads a note", "parameters": NAME}
TOOL = {"type": "function", "function": FUNCTION}

if mode == "tool":
    messages = [{"role": "user", "content": "Please read the note with name note"}]
    reply = litellm.completion(messages=messages, tools=[TOOL], **fixed).choices[0].message
    messages.append(reply.model_dump())
    for call in reply.tool_calls or []:
        result = pathlib.Path(json.loads(call.function.arguments)["name"]).read_text()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(litellm.completion(messages=messages, tools=[TOOL], **fixed).choices[0].message.content)
else:
    messages = [{"role": "user", "content": "Say hello."}]
    reply = litellm.completion(messages=messages, stream=mode == "streamed", **fixed)
    parts = [reply.choices[0].message] if mode == "plain" else [chunk.choices[0].delta for chunk in reply]
    print("".join(part.content or "" for part in parts))
