"""Ollama's SDK: `with_ollama_sdk.py URL plain|streamed|tool` prints the model's reply.

The mode `plain` also lists and shows the models; `tool` streams both replies.
"""

import pathlib
import sys

from ollama import Client

url, mode = sys.argv[1:]
client = Client(host=url)
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FUNCTION = {"name": "read_note", "description": "Reads a note", "parameters": NAME}
TOOL = {"type": "function", "function": FUNCTION}


def streamed(messages, **fields):
    """The message of a streamed reply, whose last line has the statistics."""
    whole = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    last = None
    for last in client.chat(model="hearth", messages=messages, stream=True, **fields):
        whole["content"] += last.message.content or ""
        whole["thinking"] += last.message.thinking or ""
        whole["tool_calls"] += last.message.tool_calls or []
    assert last.done and last.done_reason in ("stop", "length"), last
    assert last.eval_count > 0 and last.total_duration > 0, last
    return whole


if mode == "tool":
    messages = [{"role": "user", "content": "Please read the note with name note"}]
    reply = streamed(messages, tools=[TOOL])
    messages.append(reply)
    for call in reply["tool_calls"]:
        result = pathlib.Path(call.function.arguments["name"]).read_text()
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    print(streamed(messages, tools=[TOOL])["content"])
elif mode == "streamed":
    print(streamed([{"role": "user", "content": "Say hello."}])["content"])
else:
    assert [model.model for model in client.list().models] == ["hearth"]
    shown = client.show("hearth")
    assert "tools" in shown.capabilities, shown
    assert shown.details.quantization_level == "Q4_K_M", shown.details
    assert client.pull("hearth").status == "success"
    assert [part.status for part in client.pull("hearth", stream=True)][-1] == "success"
    assert client.ps().models[0].context_length > 0
    options = {"temperature": 0, "num_predict": 64}
    reply = client.generate(model="hearth", prompt="Say hello.", options=options)
    assert reply.done and reply.prompt_eval_count > 0, reply
    messages = [{"role": "user", "content": "Say hello."}]
    print(reply.response, client.chat(model="hearth", messages=messages).message.content)
