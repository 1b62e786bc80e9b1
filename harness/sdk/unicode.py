#!/usr/bin/env python3
"""Text whose characters are split over tokens, in every dialect, through the SDKs' own parsers, whole and
streamed.

    pip install openai anthropic
    hearth serve --script harness/sdk/unicode.jsonl &
    python3 harness/sdk/unicode.py [http://127.0.0.1:8000]

The script replays text, reasoning and a call in emoji joined of several, CJK, combining and four-byte
characters; the bundled vocabulary spells most of them in single bytes. Stop strings that begin inside of the
text must leave nothing of themselves. Exits 0 and prints one line a check, or fails with the first check that
does not hold.
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
THOUGHT, TEXT = LINES[0]["think"], LINES[0]["say"]
CALLED = 'नमस्ते 👩‍👩‍👧‍👦 "日本" \\ é'
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
STOPS = ("語 한국", "🧑🏿‍🤝‍🧑🏻", "́", " end")


def check(name, got, wanted):
    if got != wanted:
        sys.exit(f"FAILED {name}: {got!r} instead of {wanted!r}")
    print(f"ok {name}")


def chat(client, **fields):
    """Text, reasoning, the arguments of the first call, and the deltas of the text; whole and streamed must
    agree."""
    message = client.chat.completions.create(**fields).choices[0].message
    text, thought, arguments, deltas = "", "", "", []
    for chunk in client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            deltas.append(choice.delta.content or "")
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                arguments += call.function.arguments or ""
    text = "".join(deltas)
    check("  stream equals whole", text, message.content or "")
    check("  its reasoning too", thought.strip(), (getattr(message, "reasoning_content", None) or "").strip())
    check(
        "  its arguments too",
        arguments,
        message.tool_calls[0].function.arguments if message.tool_calls else "",
    )
    return text, thought.strip(), arguments, deltas


def messages(client, **fields):
    whole = client.messages.create(**fields)
    deltas = []
    with client.messages.stream(**fields) as stream:
        for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                deltas.append(event.delta.text)
        final = stream.get_final_message()
    parts = [
        {
            "text": "".join(block.text for block in message.content if block.type == "text"),
            "thought": "".join(
                block.thinking for block in message.content if block.type == "thinking"
            ).strip(),
            "called": [block.input for block in message.content if block.type == "tool_use"],
        }
        for message in (whole, final)
    ]
    check("  stream equals whole", parts[1], parts[0])
    check("  deltas join to the text", "".join(deltas), parts[0]["text"])
    return parts[0]


def responses(client, **fields):
    whole = client.responses.create(**fields)
    deltas, final = [], None
    for event in client.responses.create(stream=True, **fields):
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
        if event.type in ("response.completed", "response.incomplete"):
            final = event.response
    calls = [
        [item.arguments for item in answer.output if item.type == "function_call"]
        for answer in (whole, final)
    ]
    check("  stream equals whole", (final.output_text, calls[1]), (whole.output_text, calls[0]))
    check("  deltas join to the text", "".join(deltas), whole.output_text)
    return whole.output_text, calls[0]


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=600)
    claude = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    said = lambda text: {"model": model, "messages": [{"role": "user", "content": text}]}
    function = {"name": "post", "description": "Posts", "parameters": PARAMETERS}
    tools = [{"type": "function", "function": function}]

    text, _, _, deltas = chat(client, **said("a text"))
    check("chat: text", text, TEXT)
    check("chat: no delta holds half a character", any("\ufffd" in delta for delta in deltas), False)
    text, thought, _, _ = chat(client, **said("a thought"), extra_body={"enable_thinking": True})
    check("chat: reasoning", (text, thought), (TEXT, THOUGHT))
    _, _, arguments, _ = chat(client, **said("a call"), tools=tools)
    check("chat: arguments", json.loads(arguments), {"text": CALLED})
    logprobs = client.chat.completions.create(**said("a text"), logprobs=True).choices[0].logprobs.content
    check("chat: bytes of log-probabilities", b"".join(bytes(each.bytes) for each in logprobs).decode(), TEXT)
    for stop in STOPS:
        text, *_ = chat(client, **said("a text"), stop=[stop])
        check(f"chat: stop at {stop!r}", text, TEXT.split(stop)[0])

    claude_said = lambda text: {"max_tokens": 400, **said(text)}
    check("messages: text", messages(claude, **claude_said("a text"))["text"], TEXT)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    got = messages(claude, **{**claude_said("a thought"), "max_tokens": 2048}, thinking=thinking)
    check("messages: thinking", (got["text"], got["thought"]), (TEXT, THOUGHT))
    tool = {"name": "post", "description": "Posts", "input_schema": PARAMETERS}
    check(
        "messages: input",
        messages(claude, **claude_said("a call"), tools=[tool])["called"],
        [{"text": CALLED}],
    )
    for stop in STOPS:
        got = messages(claude, **claude_said("a text"), stop_sequences=[stop])
        check(f"messages: stop at {stop!r}", got["text"], TEXT.split(stop)[0])

    check("responses: text", responses(client, model=model, input="a text")[0], TEXT)
    _, calls = responses(
        client, model=model, input="a call", tools=[{"type": "function", "strict": False, **function}]
    )
    check("responses: arguments", [json.loads(call) for call in calls], [{"text": CALLED}])

    whole = client.completions.create(model=model, prompt="a text", max_tokens=400).choices[0].text
    parts = client.completions.create(model=model, prompt="a text", max_tokens=400, stream=True)
    check("completions: stream equals whole", "".join(part.choices[0].text for part in parts), whole)
    check("completions: text", whole, TEXT)


if __name__ == "__main__":
    main()
