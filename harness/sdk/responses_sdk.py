#!/usr/bin/env python3
"""Tests Responses with the OpenAI SDK: plain and streamed responses, tools, thinking, errors.

    pip install openai
    hearth serve &
    python3 harness/sdk/responses_sdk.py [http://127.0.0.1:8000/v1]

Prints one line per check and exits 0, or exits at the first failed check.
The model may have random weights: the checks test the protocol, and compare the text of a stream with that of
a plain response.
"""

import json
import sys

import openai

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
PROMPT = {"type": "input_text", "text": "Please get the weather, city Oslo."}
MESSAGES = [{"role": "user", "content": [PROMPT]}]


def check(name, passed, detail=""):
    if not passed:
        sys.exit(f"FAILED {name} {detail}")
    print(f"ok {name}")


def comparable(items):
    """Items without the fields that differ between two responses."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in items]


def streamed(client, **fields):
    """The response at the end of a stream, the items of its events, and the joined text deltas."""
    done, text, final, numbers = [], "", None, []
    for event in client.responses.create(stream=True, **fields):
        numbers.append(event.sequence_number)
        if event.type == "response.output_item.done":
            done.append(event.item)
        elif event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            final = event.response
    check("  sequence numbers have no gaps", numbers == list(range(len(numbers))), numbers)
    return final, done, text


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    fixed = {"model": model, "max_output_tokens": 200, "extra_body": {"seed": 1, "temperature": 0}}

    for name, fields in [
        ("text", {"input": "Hello 👋", "instructions": "Be brief."}),
        ("tool", {"input": MESSAGES, "tools": [TOOL]}),
        ("thinking", {"input": MESSAGES, "reasoning": {"effort": "low"}}),
        ("summary", {"input": MESSAGES, "reasoning": {"effort": "low", "summary": "auto"}}),
    ]:
        plain = client.responses.create(**fixed, **fields)
        check(
            f"{name}: plain response",
            plain.object == "response" and plain.status in ("completed", "incomplete"),
            plain,
        )
        final, done, text = streamed(client, **fixed, **fields)
        same = comparable(final.output) == comparable(plain.output)
        check(f"{name}: stream equals plain response", same, f"{final} {plain}")
        check(f"{name}: items of the events equal those of the response", done == final.output)
        check(f"{name}: deltas join to the text", text == final.output_text, repr(text))
        check(f"{name}: same usage", final.usage.total_tokens == plain.usage.total_tokens, final.usage)
        for item in plain.output:
            if item.type == "function_call":
                check(f"{name}: arguments are an object", isinstance(json.loads(item.arguments), dict))
        with client.responses.stream(**fixed, **fields) as stream:
            joined = stream.until_done().get_final_response()
        same = [item.type for item in joined.output] == [item.type for item in plain.output]
        check(f"{name}: the SDK's parser joins the same", same and joined.output_text == text, joined)

    history = MESSAGES + [
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "get_weather",
            "arguments": '{"city": "Oslo"}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "rain, 7 degrees"},
    ]
    after = client.responses.create(**fixed, input=history, tools=[TOOL])
    counted = client.responses.input_tokens.count(model=model, input=history, tools=[TOOL])
    check("input tokens", counted.input_tokens == after.usage.input_tokens, counted)
    print("   reply:", after.output_text[:100])

    for name, fields, code in [
        (
            "previous response",
            {"input": "x", "previous_response_id": "resp_1"},
            "previous_response_not_found",
        ),
        ("too long", {"input": "word " * 300_000}, "context_length_exceeded"),
        (
            "image",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            None,
        ),
    ]:
        try:
            client.responses.create(model=model, **fields)
            status, body = 200, None
        except openai.APIStatusError as error:
            status, body = error.status_code, error.body
        check(name, status == 400 and body["code"] == code, f"{status} {body}")


if __name__ == "__main__":
    main()
