#!/usr/bin/env python3
"""Tests a server with the Anthropic SDK: plain and streamed messages, tools, thinking, counting, errors.

    pip install anthropic
    hearth serve &
    python3 harness/sdk/anthropic_sdk.py [http://127.0.0.1:8000]

Prints one line per check and exits 0, or exits at the first failed check.
The model may have random weights: the checks test the protocol, and compare the text of a stream with that of
a plain response. The SDK's own stream parser joins the events; an unknown event fails the check.
"""

import sys

import anthropic

TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
MESSAGES = [{"role": "user", "content": "Please get the weather, city Oslo."}]


def check(name, passed, detail=""):
    if not passed:
        sys.exit(f"FAILED {name} {detail}")
    print(f"ok {name}")


def status_of(call):
    try:
        call()
        return 200, None
    except anthropic.APIStatusError as error:
        return error.status_code, error.body


def streamed(client, **fields):
    """The message that the SDK joins from the events, and the types of the events."""
    kinds = []
    with client.messages.stream(**fields) as stream:
        for event in stream:
            kinds.append(event.type)
        return stream.get_final_message(), kinds


def prompt_tokens(usage):
    """All tokens of a prompt, prefilled or cached."""
    return (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )


def blocks(message):
    """Content blocks without the fields that differ between two responses."""
    return [b.model_dump(exclude={"id", "signature", "citations", "caller"}) for b in message.content]


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0]
    check("models", model.id and model.type == "model", model)
    # The seed makes two responses comparable; the SDK has no field for it.
    fixed = {"model": model.id, "max_tokens": 200, "extra_body": {"seed": 1, "temperature": 0}}

    for name, fields in [
        ("text", {"messages": [{"role": "user", "content": "Hello 👋"}], "system": "Be brief."}),
        ("tool", {"messages": MESSAGES, "tools": [TOOL]}),
        ("thinking", {"messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("no thinking", {"messages": MESSAGES, "thinking": {"type": "disabled"}}),
    ]:
        plain = client.messages.create(**fixed, **fields)
        check(f"{name}: plain", plain.type == "message" and plain.stop_reason is not None, plain)
        final, kinds = streamed(client, **fixed, **fields)
        same = blocks(final) == blocks(plain)
        check(f"{name}: stream equals plain response", same, f"{blocks(final)} {blocks(plain)}")
        check(f"{name}: same reason", final.stop_reason == plain.stop_reason, final.stop_reason)
        check(f"{name}: same usage", final.usage.output_tokens == plain.usage.output_tokens, final.usage)
        check(f"{name}: same input", prompt_tokens(final.usage) == prompt_tokens(plain.usage), final.usage)
        check(
            f"{name}: first and last event", (kinds[0], kinds[-1]) == ("message_start", "message_stop"), kinds
        )
        for block in plain.content:
            if block.type == "thinking":
                check(f"{name}: thinking is signed", bool(block.signature))
            if block.type == "tool_use":
                check(
                    f"{name}: a declared tool", block.name == "get_weather" and isinstance(block.input, dict)
                )
        count = {
            key: value for key, value in fields.items() if key != "thinking" or value["type"] == "enabled"
        }
        counted = client.messages.count_tokens(model=model.id, **count)
        if "thinking" not in fields:
            check(f"{name}: counted", counted.input_tokens == prompt_tokens(plain.usage), counted)

    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "rain, 7 degrees"}],
    }
    history = MESSAGES + [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    after = client.messages.create(**fixed, messages=history, tools=[TOOL])
    without = client.messages.count_tokens(model=model.id, messages=MESSAGES)
    check("tool result is in the prompt", prompt_tokens(after.usage) > without.input_tokens)
    print("   reply:", "".join(block.text for block in after.content if block.type == "text")[:100])

    short = client.messages.create(model=model.id, max_tokens=1, messages=MESSAGES)
    check("max_tokens", short.stop_reason == "max_tokens", short)
    limited = {"model": model.id, "max_tokens": 8}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for name, messages, expected in [
        ("unknown role", [{"role": "wizard", "content": "x"}], "unknown role"),
        ("image", [{"role": "user", "content": [image]}], "image"),
        ("too long", [{"role": "user", "content": "word " * 300_000}], "prompt is too long"),
    ]:
        status, body = status_of(lambda: client.messages.create(**limited, messages=messages))
        check(name, status == 400 and expected in body["error"]["message"], f"{status} {body}")


if __name__ == "__main__":
    main()
