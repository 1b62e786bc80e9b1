#!/usr/bin/env python3
"""Tests a server with the OpenAI SDK: the requests that new users send first.

    pip install openai
    hearth serve model.gguf &
    python3 harness/sdk/openai_sdk.py [http://127.0.0.1:8000/v1]

Prints one line per check and exits 0, or exits at the first failed check.
The model may have random weights: the checks test the protocol, never the text.
"""

import json
import sys

import openai


def check(name, passed, detail=""):
    if not passed:
        sys.exit(f"FAILED {name} {detail}")
    print(f"ok {name}")


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    check("models", bool(model))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello 👋"}]

    plain = client.chat.completions.create(model=model, messages=messages, max_tokens=16, seed=1)
    check("chat", plain.object == "chat.completion" and plain.choices[0].finish_reason in ("stop", "length"))
    usage = plain.usage
    check("usage", usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)

    again = client.chat.completions.create(model=model, messages=messages, max_tokens=16, seed=1)
    check("seed repeats", again.choices[0].message.content == plain.choices[0].message.content)

    text, reason, counted = "", None, None
    for chunk in client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=16,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage:
            counted = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    check("stream equals plain response", text == (plain.choices[0].message.content or ""), repr(text))
    check("stream finish reason", reason == plain.choices[0].finish_reason, reason)
    check("stream usage", counted is not None and counted.completion_tokens == usage.completion_tokens)

    several = client.chat.completions.create(
        model=model, messages=messages, max_tokens=4, n=3, seed=5, logprobs=True, top_logprobs=2
    )
    check("n", [c.index for c in several.choices] == [0, 1, 2])
    for choice in several.choices:
        joined = b"".join(bytes(t.bytes or []) for t in choice.logprobs.content)
        check("logprobs join to content", joined.decode("utf-8", "replace") == (choice.message.content or ""))
        check("top logprobs", all(len(t.top_logprobs) == 2 for t in choice.logprobs.content))

    completion = client.completions.create(model=model, prompt=["One", "Two"], max_tokens=4, temperature=0)
    check("completions", len(completion.choices) == 2 and completion.object == "text_completion")

    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    history = messages + [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": json.dumps({"city": "Oslo"})},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    with_tools = client.chat.completions.create(model=model, messages=history, tools=[tool], max_tokens=4)
    check("tools in", with_tools.usage.prompt_tokens > usage.prompt_tokens)

    for name, arguments, expected in [
        ("unknown role", {"messages": [{"role": "wizard", "content": "x"}]}, 400),
        ("temperature out of range", {"messages": messages, "temperature": 3}, 400),
        (
            "image",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                ]
            },
            400,
        ),
        ("context too long", {"messages": [{"role": "user", "content": "word " * 300_000}]}, 400),
    ]:
        try:
            client.chat.completions.create(model=model, **arguments)
            status, body = 200, None
        except openai.APIStatusError as error:
            status, body = error.status_code, error.body
        check(name, status == expected and body and body.get("message"), f"{status} {body}")


if __name__ == "__main__":
    main()
