#!/usr/bin/env python3
"""The Anthropic SDK against a running server: whole and streamed messages, tools, thinking, counting, errors.

    pip install anthropic
    hearth serve &
    python3 harness/sdk/anthropic_sdk.py [http://127.0.0.1:8000]

Exits 0 and prints one line a check, or fails with the first check that does not hold.
The model may be one with random weights: the protocol is judged, and text only where whole and stream must
agree. The SDK's own stream parser joins the events; a shape it does not know fails the check.
"""

import sys

import anthropic

TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK = [{"role": "user", "content": "Please get the weather, city Oslo."}]


def check(name, holds, detail=""):
    if not holds:
        sys.exit(f"FAILED {name} {detail}")
    print(f"ok {name}")


def status_of(call):
    try:
        call()
        return 200, None
    except anthropic.APIStatusError as error:
        return error.status_code, error.body


def streamed(client, **fields):
    """The message as the SDK joins it from its events, and the types of the events."""
    kinds = []
    with client.messages.stream(**fields) as stream:
        for event in stream:
            kinds.append(event.type)
        return stream.get_final_message(), kinds


def prompt(usage):
    """Tokens of a prompt, whether they were run or found in the cache."""
    return (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )


def blocks(message):
    """Blocks without what differs between two answers."""
    return [b.model_dump(exclude={"id", "signature", "citations", "caller"}) for b in message.content]


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0]
    check("models", model.id and model.type == "model", model)
    # A seed is no field of this SDK; with it, two answers can be compared.
    fixed = {"model": model.id, "max_tokens": 200, "extra_body": {"seed": 1, "temperature": 0}}

    for name, fields in [
        ("text", {"messages": [{"role": "user", "content": "Hello 👋"}], "system": "Be brief."}),
        ("tool", {"messages": ASK, "tools": [TOOL]}),
        ("thinking", {"messages": ASK, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("no thinking", {"messages": ASK, "thinking": {"type": "disabled"}}),
    ]:
        whole = client.messages.create(**fixed, **fields)
        check(f"{name}: whole", whole.type == "message" and whole.stop_reason is not None, whole)
        final, kinds = streamed(client, **fixed, **fields)
        check(
            f"{name}: stream equals whole", blocks(final) == blocks(whole), f"{blocks(final)} {blocks(whole)}"
        )
        check(f"{name}: same reason", final.stop_reason == whole.stop_reason, final.stop_reason)
        check(f"{name}: same usage", final.usage.output_tokens == whole.usage.output_tokens, final.usage)
        check(f"{name}: same input", prompt(final.usage) == prompt(whole.usage), final.usage)
        check(
            f"{name}: first and last event", (kinds[0], kinds[-1]) == ("message_start", "message_stop"), kinds
        )
        for block in whole.content:
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
            check(f"{name}: counted", counted.input_tokens == prompt(whole.usage), counted)

    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "rain, 7 degrees"}],
    }
    history = ASK + [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    after = client.messages.create(**fixed, messages=history, tools=[TOOL])
    check(
        "tool result in",
        prompt(after.usage) > client.messages.count_tokens(model=model.id, messages=ASK).input_tokens,
    )
    print("   it says:", "".join(block.text for block in after.content if block.type == "text")[:100])

    short = client.messages.create(model=model.id, max_tokens=1, messages=ASK)
    check("max_tokens", short.stop_reason == "max_tokens", short)
    ask = {"model": model.id, "max_tokens": 8}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for name, messages, expected in [
        ("unknown role", [{"role": "wizard", "content": "x"}], "unknown role"),
        ("image", [{"role": "user", "content": [image]}], "image"),
        ("too long", [{"role": "user", "content": "word " * 300_000}], "prompt is too long"),
    ]:
        status, body = status_of(lambda: client.messages.create(**ask, messages=messages))
        check(name, status == 400 and expected in body["error"]["message"], f"{status} {body}")


if __name__ == "__main__":
    main()
