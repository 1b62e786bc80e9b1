#!/usr/bin/env python3
"""Replies in forced shapes through the SDKs' own parsers: schemas, named and required calls, thinking within
a budget.

    pip install openai anthropic
    hearth serve &
    python3 harness/sdk/forced_sdk.py [http://127.0.0.1:8000]

The bundled model would hardly write these shapes by itself: they come from constrained decoding.
Exits 0 and prints one line a check, or fails with the first check that does not hold.
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
ASK = [{"role": "user", "content": "Tell me about a thing."}]


def check(name, holds, detail=""):
    if not holds:
        sys.exit(f"FAILED {name} {detail}")
    print(f"ok {name}")


def shaped(client, model):
    """Schemas, in chat and Responses."""
    fixed = {"model": model, "temperature": 0, "seed": 1}
    body = {"enable_thinking": False}
    whole = client.chat.completions.parse(
        **fixed, messages=ASK, response_format=Thing, max_tokens=400, extra_body=body
    )
    said = whole.choices[0]
    check(
        "chat: a parsed schema", said.finish_reason == "stop" and isinstance(said.message.parsed, Thing), said
    )
    asked = {"messages": ASK, "response_format": Thing, "max_tokens": 400, "extra_body": body}
    with client.chat.completions.stream(**fixed, **asked) as stream:
        final = stream.get_final_completion().choices[0].message
    check("chat: the stream parses to the same", final.parsed == said.message.parsed, final)
    for temperature in (0.7, 1.5):
        drawn = client.chat.completions.parse(
            **{**fixed, "temperature": temperature},
            messages=ASK,
            response_format=Thing,
            max_tokens=800,
            extra_body=body,
        )
        check(
            f"chat: a schema at temperature {temperature}",
            isinstance(drawn.choices[0].message.parsed, Thing),
            drawn,
        )
    loose = client.chat.completions.create(
        **fixed, messages=ASK, response_format={"type": "json_object"}, max_tokens=400, extra_body=body
    ).choices[0]
    check(
        "chat: json_object",
        loose.finish_reason == "length" or isinstance(json.loads(loose.message.content), dict),
        loose,
    )
    answer = client.responses.parse(
        model=model, input="Tell me about a thing.", text_format=Thing, max_output_tokens=400
    )
    check("responses: a parsed schema", isinstance(answer.output_parsed, Thing), answer)
    with client.responses.stream(
        model=model, input="Tell me about a thing.", text_format=Thing, max_output_tokens=400, temperature=0
    ) as stream:
        joined = stream.until_done().get_final_response()
    check("responses: the stream parses", isinstance(joined.output_parsed, Thing), joined)
    # Of a kind that no grammar can hold; refused by name, not ignored.
    broken = {"name": "x", "strict": True, "schema": {"type": "object", "not": {"required": ["a"]}}}
    try:
        client.chat.completions.create(
            **fixed, messages=ASK, response_format={"type": "json_schema", "json_schema": broken}
        )
        status, message = 200, ""
    except openai.APIStatusError as error:
        status, message = error.status_code, error.message
    check(
        "chat: an unsupported keyword is refused by name",
        status == 400 and "not" in message,
        f"{status} {message}",
    )


def called(client, model):
    """Forced calls, in chat and Responses."""
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    fixed = {"model": model, "messages": ASK, "tools": tools, "temperature": 0, "seed": 1, "max_tokens": 400}
    for name, choice, wanted in [
        ("required", "required", {"get_weather", "turn_to"}),
        ("named", {"type": "function", "function": {"name": "turn_to"}}, {"turn_to"}),
        ("named", {"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ]:
        whole = client.chat.completions.create(**fixed, tool_choice=choice).choices[0]
        calls = whole.message.tool_calls or []
        check(
            f"chat: {name} calls {sorted(wanted)}",
            calls and {call.function.name for call in calls} <= wanted,
            whole,
        )
        for call in calls:
            arguments = json.loads(call.function.arguments)
            fits = (
                isinstance(arguments.get("page"), int)
                if call.function.name == "turn_to"
                else isinstance(arguments.get("city"), str)
            )
            check("  its arguments fit the schema", fits, arguments)
        with client.chat.completions.stream(**fixed, tool_choice=choice) as stream:
            joined = stream.get_final_completion().choices[0].message.tool_calls
        same = [(call.function.name, call.function.arguments) for call in joined]
        check(
            "  the stream calls the same",
            same == [(call.function.name, call.function.arguments) for call in calls],
            joined,
        )
    none = client.chat.completions.create(**fixed, tool_choice="none").choices[0]
    check("chat: none calls nothing", not none.message.tool_calls, none)
    flat = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
    answer = client.responses.create(
        model=model,
        input="Hello.",
        tools=flat,
        tool_choice={"type": "function", "name": "turn_to"},
        max_output_tokens=400,
    )
    names = [item.name for item in answer.output if item.type == "function_call"]
    check("responses: named", names and set(names) == {"turn_to"}, answer)


def of_anthropic(client, model):
    """Forced calls and thinking within a budget, in messages."""
    tools = [
        {"name": of["name"], "description": of["description"], "input_schema": of["parameters"]}
        for of in FUNCTIONS
    ]
    fixed = {"model": model, "messages": ASK, "max_tokens": 400}
    for name, choice, wanted in [
        ("any", {"type": "any"}, {"get_weather", "turn_to"}),
        ("tool", {"type": "tool", "name": "get_weather"}, {"get_weather"}),
    ]:
        whole = client.messages.create(**fixed, tools=tools, tool_choice=choice)
        names = {block.name for block in whole.content if block.type == "tool_use"}
        check(f"messages: {name}", names and names <= wanted and whole.stop_reason == "tool_use", whole)
    story = [{"role": "user", "content": "Write a long story about the sea."}]
    budget = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(model=model, messages=story, max_tokens=2048, thinking=budget) as stream:
        final = stream.get_final_message()
    kinds = [block.type for block in final.content]
    check("messages: thinking comes first", kinds in (["thinking", "text"], ["thinking"], ["text"]), kinds)


def budgets(client, model):
    """Thinking that is closed by its budget."""
    for budget in (64, 80, 100):
        answer = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "user", "content": "Please think about the sea, the moon and the old bridge."}
            ],
            max_tokens=600,
            temperature=1.5,
            seed=budget,
            extra_body={"thinking": {"type": "enabled", "budget_tokens": budget}},
        )
        details = answer.choices[0].model_dump().get("finish_details") or {}
        thought = answer.usage.completion_tokens_details.reasoning_tokens
        check(
            f"chat: a budget of {budget} holds: {details}",
            details.get("close_kind") in ("natural", "soft", "hard"),
            answer,
        )
        # The words that close the thinking are written by the server and come on top.
        check(f"  {thought} tokens of reasoning", thought <= budget + 64, thought)


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    shaped(client, model)
    called(client, model)
    of_anthropic(anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=600), model)
    budgets(client, model)


if __name__ == "__main__":
    main()
