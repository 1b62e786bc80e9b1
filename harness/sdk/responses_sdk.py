#!/usr/bin/env python3
"""The OpenAI SDK's Responses against a running server: whole and streamed answers, tools, thinking, errors.

    pip install openai
    hearth serve &
    python3 harness/sdk/responses_sdk.py [http://127.0.0.1:8000/v1]

Exits 0 and prints one line a check, or fails with the first check that does not hold.
The model may be one with random weights: the protocol is judged, and text only where whole and stream must
agree.
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
ASK = [{"role": "user", "content": [{"type": "input_text", "text": "Please get the weather, city Oslo."}]}]


def check(name, holds, detail=""):
    if not holds:
        sys.exit(f"FAILED {name} {detail}")
    print(f"ok {name}")


def plain(items):
    """Items without what differs between two answers."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in items]


def streamed(client, **fields):
    """The answer at the end of the stream, its items as they were done, and the text of its deltas."""
    done, text, final, numbers = [], "", None, []
    for event in client.responses.create(stream=True, **fields):
        numbers.append(event.sequence_number)
        if event.type == "response.output_item.done":
            done.append(event.item)
        elif event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            final = event.response
    check("  numbers without gaps", numbers == list(range(len(numbers))), numbers)
    return final, done, text


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    fixed = {"model": model, "max_output_tokens": 200, "extra_body": {"seed": 1, "temperature": 0}}

    for name, fields in [
        ("text", {"input": "Hello 👋", "instructions": "Be brief."}),
        ("tool", {"input": ASK, "tools": [TOOL]}),
        ("thinking", {"input": ASK, "reasoning": {"effort": "low"}}),
        ("summary", {"input": ASK, "reasoning": {"effort": "low", "summary": "auto"}}),
    ]:
        whole = client.responses.create(**fixed, **fields)
        check(
            f"{name}: whole",
            whole.object == "response" and whole.status in ("completed", "incomplete"),
            whole,
        )
        final, done, text = streamed(client, **fixed, **fields)
        check(f"{name}: stream equals whole", plain(final.output) == plain(whole.output), f"{final} {whole}")
        check(f"{name}: items done equal the answer's", done == final.output)
        check(f"{name}: deltas join to the text", text == final.output_text, repr(text))
        check(f"{name}: same usage", final.usage.total_tokens == whole.usage.total_tokens, final.usage)
        for item in whole.output:
            if item.type == "function_call":
                check(f"{name}: arguments are an object", isinstance(json.loads(item.arguments), dict))
        with client.responses.stream(**fixed, **fields) as stream:
            joined = stream.until_done().get_final_response()
        same = [item.type for item in joined.output] == [item.type for item in whole.output]
        check(f"{name}: the SDK joins the same", same and joined.output_text == text, joined)

    history = ASK + [
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
    print("   it says:", after.output_text[:100])

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
