#!/usr/bin/env python3
"""Characters that span several tokens, in every API, plain and streamed, through the SDKs' own parsers.

    pip install openai anthropic
    hearth serve --script harness/sdk/unicode.jsonl &
    python3 harness/sdk/unicode.py [http://127.0.0.1:8000]

The script replays text, reasoning and a tool call with joined emoji, CJK, combining and four-byte characters.
The bundled vocabulary encodes most of them as single bytes. No part of a stop string may appear in the text.
Prints one line per check and exits 0, or exits at the first failed check.
"""

import json
import pathlib
import sys

import anthropic
import openai

LINES = [
    json.loads(line)
    for line in (pathlib.Path(__file__).parent / "unicode.jsonl").read_text().splitlines()
    if line[0] == "{"
]
REASONING, TEXT = LINES[0]["think"], LINES[0]["say"]
ARGUMENT = 'नमस्ते 👩‍👩‍👧‍👦 "日本" \\ é'
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
STOPS = ("語 한국", "🧑🏿‍🤝‍🧑🏻", "́", " end")


def check(name, got, expected):
    if got != expected:
        sys.exit(f"FAILED {name}: {got!r} instead of {expected!r}")
    print(f"ok {name}")


def chat(client, **fields):
    """Text, reasoning, call arguments and text deltas of a stream, which must equal the plain response."""
    message = client.chat.completions.create(**fields).choices[0].message
    text, reasoning, arguments, deltas = "", "", "", []
    for chunk in client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            deltas.append(choice.delta.content or "")
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                arguments += call.function.arguments or ""
    text = "".join(deltas)
    check("  stream equals plain response", text, message.content or "")
    plain_reasoning = getattr(message, "reasoning_content", None) or ""
    check("  its reasoning too", reasoning.strip(), plain_reasoning.strip())
    check(
        "  its arguments too",
        arguments,
        message.tool_calls[0].function.arguments if message.tool_calls else "",
    )
    return text, reasoning.strip(), arguments, deltas


def messages(client, **fields):
    plain = client.messages.create(**fields)
    deltas = []
    with client.messages.stream(**fields) as stream:
        for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                deltas.append(event.delta.text)
        final = stream.get_final_message()
    parts = [
        {
            "text": "".join(block.text for block in message.content if block.type == "text"),
            "reasoning": "".join(
                block.thinking for block in message.content if block.type == "thinking"
            ).strip(),
            "inputs": [block.input for block in message.content if block.type == "tool_use"],
        }
        for message in (plain, final)
    ]
    check("  stream equals plain response", parts[1], parts[0])
    check("  deltas join to the text", "".join(deltas), parts[0]["text"])
    return parts[0]


def responses(client, **fields):
    plain = client.responses.create(**fields)
    deltas, final = [], None
    for event in client.responses.create(stream=True, **fields):
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
        if event.type in ("response.completed", "response.incomplete"):
            final = event.response
    calls = [
        [item.arguments for item in response.output if item.type == "function_call"]
        for response in (plain, final)
    ]
    check("  stream equals plain response", (final.output_text, calls[1]), (plain.output_text, calls[0]))
    check("  deltas join to the text", "".join(deltas), plain.output_text)
    return plain.output_text, calls[0]


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=600)
    claude = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    request = lambda text: {"model": model, "messages": [{"role": "user", "content": text}]}
    function = {"name": "post", "description": "Posts", "parameters": PARAMETERS}
    tools = [{"type": "function", "function": function}]

    text, _, _, deltas = chat(client, **request("a text"))
    check("chat: text", text, TEXT)
    check("chat: no delta has half a character", any("\ufffd" in delta for delta in deltas), False)
    text, reasoning, _, _ = chat(client, **request("a thought"), extra_body={"enable_thinking": True})
    check("chat: reasoning", (text, reasoning), (TEXT, REASONING))
    _, _, arguments, _ = chat(client, **request("a call"), tools=tools)
    check("chat: arguments", json.loads(arguments), {"text": ARGUMENT})
    logprobs = client.chat.completions.create(**request("a text"), logprobs=True).choices[0].logprobs.content
    check("chat: bytes of log-probabilities", b"".join(bytes(each.bytes) for each in logprobs).decode(), TEXT)
    for stop in STOPS:
        text, *_ = chat(client, **request("a text"), stop=[stop])
        check(f"chat: stop at {stop!r}", text, TEXT.split(stop)[0])

    claude_request = lambda text: {"max_tokens": 400, **request(text)}
    check("messages: text", messages(claude, **claude_request("a text"))["text"], TEXT)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    got = messages(claude, **{**claude_request("a thought"), "max_tokens": 2048}, thinking=thinking)
    check("messages: thinking", (got["text"], got["reasoning"]), (TEXT, REASONING))
    tool = {"name": "post", "description": "Posts", "input_schema": PARAMETERS}
    check(
        "messages: input",
        messages(claude, **claude_request("a call"), tools=[tool])["inputs"],
        [{"text": ARGUMENT}],
    )
    for stop in STOPS:
        got = messages(claude, **claude_request("a text"), stop_sequences=[stop])
        check(f"messages: stop at {stop!r}", got["text"], TEXT.split(stop)[0])

    check("responses: text", responses(client, model=model, input="a text")[0], TEXT)
    _, calls = responses(
        client, model=model, input="a call", tools=[{"type": "function", "strict": False, **function}]
    )
    check("responses: arguments", [json.loads(call) for call in calls], [{"text": ARGUMENT}])

    plain = client.completions.create(model=model, prompt="a text", max_tokens=400).choices[0].text
    parts = client.completions.create(model=model, prompt="a text", max_tokens=400, stream=True)
    check("completions: stream equals plain response", "".join(part.choices[0].text for part in parts), plain)
    check("completions: text", plain, TEXT)


if __name__ == "__main__":
    main()
