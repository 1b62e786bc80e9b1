#!/usr/bin/env python3
"""Constrained replies through the SDKs' own parsers: schemas, forced tool calls, thinking budgets.

    pip install openai anthropic
    hearth serve &
    python3 harness/sdk/forced_sdk.py [http://127.0.0.1:8000]

The bundled model would rarely produce such replies itself; constrained decoding forces them.
Prints one line per check and exits 0, or exits at the first failed check.
"""

import enum
import json
import sys

import anthropic
import openai
import pydantic


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Thing(pydantic.BaseModel):
    name: str
    colour: Colour
    sizes: list[int] = pydantic.Field(max_length=3)


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
PAGE = {
    "type": "object",
    "properties": {"page": {"type": "integer"}},
    "required": ["page"],
    "additionalProperties": False,
}
FUNCTIONS = [
    {"name": "get_weather", "description": "Weather of a city", "parameters": CITY},
    {"name": "turn_to", "description": "Turns to a page", "parameters": PAGE},
]
MESSAGES = [{"role": "user", "content": "Tell me about a thing."}]


def check(name, passed, detail=""):
    if not passed:
        sys.exit(f"FAILED {name} {detail}")
    print(f"ok {name}")


def check_schemas(client, model):
    """Schemas, in chat and Responses."""
    fixed = {"model": model, "temperature": 0, "seed": 1}
    body = {"enable_thinking": False}
    plain = client.chat.completions.parse(
        **fixed, messages=MESSAGES, response_format=Thing, max_tokens=400, extra_body=body
    )
    choice = plain.choices[0]
    check(
        "chat: a parsed schema",
        choice.finish_reason == "stop" and isinstance(choice.message.parsed, Thing),
        choice,
    )
    fields = {"messages": MESSAGES, "response_format": Thing, "max_tokens": 400, "extra_body": body}
    with client.chat.completions.stream(**fixed, **fields) as stream:
        final = stream.get_final_completion().choices[0].message
    check("chat: the stream parses to the same", final.parsed == choice.message.parsed, final)
    for temperature in (0.7, 1.5):
        sampled = client.chat.completions.parse(
            **{**fixed, "temperature": temperature},
            messages=MESSAGES,
            response_format=Thing,
            max_tokens=800,
            extra_body=body,
        )
        check(
            f"chat: a schema at temperature {temperature}",
            isinstance(sampled.choices[0].message.parsed, Thing),
            sampled,
        )
    loose = client.chat.completions.create(
        **fixed, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=400, extra_body=body
    ).choices[0]
    check(
        "chat: json_object",
        loose.finish_reason == "length" or isinstance(json.loads(loose.message.content), dict),
        loose,
    )
    response = client.responses.parse(
        model=model, input="Tell me about a thing.", text_format=Thing, max_output_tokens=400
    )
    check("responses: a parsed schema", isinstance(response.output_parsed, Thing), response)
    with client.responses.stream(
        model=model, input="Tell me about a thing.", text_format=Thing, max_output_tokens=400, temperature=0
    ) as stream:
        joined = stream.until_done().get_final_response()
    check("responses: the stream parses", isinstance(joined.output_parsed, Thing), joined)
    # The grammar does not support this keyword: the error must name it.
    unsupported = {"name": "x", "strict": True, "schema": {"type": "object", "not": {"required": ["a"]}}}
    try:
        client.chat.completions.create(
            **fixed, messages=MESSAGES, response_format={"type": "json_schema", "json_schema": unsupported}
        )
        status, message = 200, ""
    except openai.APIStatusError as error:
        status, message = error.status_code, error.message
    check(
        "chat: the error names an unsupported keyword",
        status == 400 and "not" in message,
        f"{status} {message}",
    )


def check_calls(client, model):
    """Forced calls, in chat and Responses."""
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    fixed = {"model": model, "messages": MESSAGES, "tools": tools, "max_tokens": 400}
    fixed |= {"temperature": 0, "seed": 1}
    for name, choice, expected in [
        ("required", "required", {"get_weather", "turn_to"}),
        ("named", {"type": "function", "function": {"name": "turn_to"}}, {"turn_to"}),
        ("named", {"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ]:
        plain = client.chat.completions.create(**fixed, tool_choice=choice).choices[0]
        calls = plain.message.tool_calls or []
        check(
            f"chat: {name} calls {sorted(expected)}",
            calls and {call.function.name for call in calls} <= expected,
            plain,
        )
        for call in calls:
            arguments = json.loads(call.function.arguments)
            valid = (
                isinstance(arguments.get("page"), int)
                if call.function.name == "turn_to"
                else isinstance(arguments.get("city"), str)
            )
            check("  its arguments match the schema", valid, arguments)
        with client.chat.completions.stream(**fixed, tool_choice=choice) as stream:
            joined = stream.get_final_completion().choices[0].message.tool_calls
        streamed = [(call.function.name, call.function.arguments) for call in joined]
        check(
            "  the stream has the same calls",
            streamed == [(call.function.name, call.function.arguments) for call in calls],
            joined,
        )
    none = client.chat.completions.create(**fixed, tool_choice="none").choices[0]
    check("chat: `none` calls no tool", not none.message.tool_calls, none)
    flat = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
    response = client.responses.create(
        model=model,
        input="Hello.",
        tools=flat,
        tool_choice={"type": "function", "name": "turn_to"},
        max_output_tokens=400,
    )
    names = [item.name for item in response.output if item.type == "function_call"]
    check("responses: named", names and set(names) == {"turn_to"}, response)


def check_messages(client, model):
    """Forced calls and thinking budgets, in Anthropic's Messages API."""
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in FUNCTIONS
    ]
    fixed = {"model": model, "messages": MESSAGES, "max_tokens": 400}
    for name, choice, expected in [
        ("any", {"type": "any"}, {"get_weather", "turn_to"}),
        ("tool", {"type": "tool", "name": "get_weather"}, {"get_weather"}),
    ]:
        plain = client.messages.create(**fixed, tools=tools, tool_choice=choice)
        names = {block.name for block in plain.content if block.type == "tool_use"}
        check(f"messages: {name}", names and names <= expected and plain.stop_reason == "tool_use", plain)
    story = [{"role": "user", "content": "Write a long story about the sea."}]
    budget = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(model=model, messages=story, max_tokens=2048, thinking=budget) as stream:
        final = stream.get_final_message()
    kinds = [block.type for block in final.content]
    check("messages: thinking comes first", kinds in (["thinking", "text"], ["thinking"], ["text"]), kinds)


def check_budgets(client, model):
    """Thinking that its budget ends."""
    for budget in (64, 80, 100):
        response = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "user", "content": "Please think about the sea, the moon and the old bridge."}
            ],
            max_tokens=600,
            temperature=1.5,
            seed=budget,
            extra_body={"thinking": {"type": "enabled", "budget_tokens": budget}},
        )
        details = response.choices[0].model_dump().get("finish_details") or {}
        reasoning_tokens = response.usage.completion_tokens_details.reasoning_tokens
        check(
            f"chat: a budget of {budget} ends the reasoning: {details}",
            details.get("close_kind") in ("natural", "soft", "hard"),
            response,
        )
        # The server adds the text that closes the thinking; it is not part of the budget.
        check(f"  {reasoning_tokens} reasoning tokens", reasoning_tokens <= budget + 64, reasoning_tokens)


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    check_schemas(client, model)
    check_calls(client, model)
    check_messages(anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=600), model)
    check_budgets(client, model)


if __name__ == "__main__":
    main()
