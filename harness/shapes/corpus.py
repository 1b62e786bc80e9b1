"""Typical schemas for models: extraction, tools, configuration, and the output of pydantic and zod.

Each entry is a name and a schema. They were written for this file, in the style of client requests.
"""


def obj(properties, required=None, **more):
    """An object with all properties required unless `required` says otherwise."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, **more}


def arr(items, **more):
    return {"type": "array", "items": items, **more}


S, I, N, B, NULL = ({"type": t} for t in ("string", "integer", "number", "boolean", "null"))
CLOSED = {"additionalProperties": False}


def short(most=24, **more):
    return {"type": "string", "maxLength": most, **more}


def enum(*values):
    return {"enum": list(values)}


SCHEMAS = {
    # Single values.
    "boolean": B,
    "null": NULL,
    "grade": {"type": "integer", "minimum": 1, "maximum": 5},
    "probability": {"type": "number", "minimum": 0, "maximum": 1},
    "sentiment": enum("positive", "neutral", "negative"),
    "mixed-enum": enum("a", 1, 2.5, True, None, ["x"], {"k": "v"}),
    "constant": {"const": {"version": 2, "tags": ["a", "b"]}},
    "short-text": short(30, minLength=3),
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email", "maxLength": 200},
    "time": {"type": "string", "format": "time"},
    "postcode": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
    "hex-colour": {"type": "string", "pattern": "^#[0-9a-fA-F]{6}$"},
    "semver": {
        "type": "string",
        "pattern": "^(0|[1-9][0-9]{0,3})\\.(0|[1-9][0-9]{0,3})\\.(0|[1-9][0-9]{0,3})$",
    },
    "nullable": {"type": ["string", "null"], "maxLength": 10},
    "any-of-types": {"anyOf": [I, B, NULL, short(8)]},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "exclusive": {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    # Extraction.
    "person": obj(
        {
            "name": short(),
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"anyOf": [short(40), NULL]},
        },
        **CLOSED,
    ),
    "address": obj(
        {
            "street": short(),
            "city": short(),
            "zip": {"type": "string", "pattern": "^[0-9]{4,5}$"},
            "country": enum("DE", "NO", "US", "JP"),
        },
        **CLOSED,
    ),
    "invoice": obj(
        {
            "number": short(12),
            "issued": {"type": "string", "format": "date"},
            "currency": enum("EUR", "USD"),
            "lines": arr(
                obj(
                    {
                        "item": short(20),
                        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                        "price": {"type": "number", "minimum": 0},
                    },
                    **CLOSED,
                ),
                minItems=1,
                maxItems=3,
            ),
            "total": {"type": "number", "minimum": 0},
        },
        **CLOSED,
    ),
    "calendar": obj(
        {
            "title": short(),
            "start": {"type": "string", "format": "date-time"},
            "guests": arr(short(16), maxItems=3),
            "repeats": {
                "anyOf": [
                    obj(
                        {
                            "every": enum("day", "week", "month"),
                            "times": {"type": "integer", "minimum": 1, "maximum": 52},
                        },
                        **CLOSED,
                    ),
                    NULL,
                ]
            },
        },
        **CLOSED,
    ),
    "recipe": obj(
        {
            "name": short(),
            "minutes": {"type": "integer", "minimum": 1, "maximum": 600},
            "ingredients": arr(
                obj(
                    {"what": short(16), "grams": {"type": "number", "exclusiveMinimum": 0, "maximum": 5000}},
                    **CLOSED,
                ),
                minItems=1,
                maxItems=3,
            ),
            "vegan": B,
        },
        **CLOSED,
    ),
    "classification": obj(
        {
            "label": enum("bug", "feature", "question", "docs"),
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
            "reason": short(60),
        },
        **CLOSED,
    ),
    "entities": obj(
        {
            "entities": arr(
                obj(
                    {
                        "text": short(20),
                        "kind": enum("person", "place", "date", "company"),
                        "span": arr(
                            {"type": "integer", "minimum": 0, "maximum": 9999}, minItems=2, maxItems=2
                        ),
                    },
                    **CLOSED,
                ),
                maxItems=3,
            )
        },
        **CLOSED,
    ),
    "triples": obj(
        {
            "triples": arr(
                {
                    "type": "array",
                    "prefixItems": [short(12), short(12), short(12)],
                    "items": False,
                    "minItems": 3,
                    "maxItems": 3,
                },
                maxItems=2,
            )
        },
        **CLOSED,
    ),
    "survey": obj({f"q{i}": enum("yes", "no", "unsure") for i in range(1, 9)}, **CLOSED),
    "optional-only": obj({"a": I, "b": short(6), "c": B}, [], **CLOSED),
    "open-world": obj({"id": I}),
    "typed-map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 3,
    },
    "pattern-properties": {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,6}$": B},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "matrix": arr(arr(I, minItems=2, maxItems=2), minItems=2, maxItems=2),
    "unicode-keys": obj(
        {"größe": I, "価格": {"type": "number", "minimum": 0}, "emoji😀": B, "quote\"key": NULL}, **CLOSED
    ),
    "escapes": enum("line\nbreak", "tab\there", "quote\"", "back\\slash", "日本", "é"),
    "empty-object": obj({}, **CLOSED),
    "nested": obj(
        {"a": obj({"b": obj({"c": obj({"d": enum(1, 2)}, **CLOSED)}, **CLOSED)}, **CLOSED)}, **CLOSED
    ),
    # In the style of pydantic and zod.
    "pydantic-refs": {
        "$defs": {
            "Point": obj({"x": N, "y": N}, title="Point"),
            "Kind": {"enum": ["line", "dot"], "title": "Kind", "type": "string"},
        },
        **obj(
            {
                "kind": {"$ref": "#/$defs/Kind"},
                "points": arr({"$ref": "#/$defs/Point"}, minItems=1, maxItems=2),
            },
            title="Shape",
        ),
    },
    "pydantic-optional": obj(
        {
            "name": {**short(12), "title": "Name"},
            "nick": {"anyOf": [short(8), NULL], "default": None, "title": "Nick"},
        },
        ["name"],
        title="User",
    ),
    "recursive-tree": {
        "$defs": {
            "node": obj(
                {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, NULL]},
                },
                **CLOSED,
            )
        },
        "$ref": "#/$defs/node",
    },
    "recursive-root": obj({"tag": enum("div", "p"), "children": arr({"$ref": "#"}, maxItems=1)}, **CLOSED),
    "definitions-old": {
        "definitions": {
            "money": obj({"amount": {"type": "integer", "minimum": 0}, "unit": enum("EUR", "USD")}, **CLOSED)
        },
        **obj({"paid": {"$ref": "#/definitions/money"}, "open": {"$ref": "#/definitions/money"}}, **CLOSED),
    },
    "escaped-pointer": {
        "$defs": {"a/b": I, "c~d": B},
        **obj({"one": {"$ref": "#/$defs/a~1b"}, "two": {"$ref": "#/$defs/c~0d"}}, **CLOSED),
    },
    "union-by-tag": {
        "anyOf": [
            obj({"type": {"const": "circle"}, "r": {"type": "number", "minimum": 0}}, **CLOSED),
            obj({"type": {"const": "square"}, "side": {"type": "number", "minimum": 0}}, **CLOSED),
        ]
    },
    "one-of-disjoint": {
        "oneOf": [
            obj({"kind": {"const": "a"}, "v": I}, **CLOSED),
            obj({"kind": {"const": "b"}, "v": B}, **CLOSED),
        ]
    },
    "all-of": {
        "allOf": [obj({"id": {"type": "integer", "minimum": 1, "maximum": 99}}), obj({"name": short(10)})]
    },
    "zod": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **obj(
            {
                "steps": arr(
                    obj({"explanation": short(40), "output": short(16)}, **CLOSED), minItems=1, maxItems=2
                ),
                "final_answer": short(16),
            },
            **CLOSED,
        ),
    },
    # Arguments of tools.
    "tool-read": obj(
        {
            "file_path": short(40, description="absolute"),
            "offset": {"type": "integer", "minimum": 0},
            "limit": {"type": "integer", "minimum": 1},
        },
        ["file_path"],
        **CLOSED,
    ),
    "tool-shell": obj(
        {
            "command": arr(short(16), minItems=1, maxItems=4),
            "workdir": short(20),
            "timeout_ms": {"type": "integer", "minimum": 0, "maximum": 600000},
        },
        ["command"],
        **CLOSED,
    ),
    "tool-edit": obj(
        {
            "path": short(30),
            "edits": arr(obj({"old": short(20), "new": short(20)}, **CLOSED), minItems=1, maxItems=2),
            "replace_all": {**B, "default": False},
        },
        ["path", "edits"],
        **CLOSED,
    ),
    "tool-search": obj(
        {
            "query": short(30, minLength=2),
            "domains": arr(short(12), maxItems=2),
            "recency": enum("day", "week", "month", "any"),
        },
        ["query"],
        **CLOSED,
    ),
    "tool-todo": obj(
        {
            "todos": arr(
                obj(
                    {
                        "content": short(24, minLength=1),
                        "status": enum("pending", "in_progress", "completed"),
                        "id": short(4),
                    },
                    **CLOSED,
                ),
                minItems=1,
                maxItems=2,
            )
        },
        **CLOSED,
    ),
    "tool-browser": obj(
        {
            "action": enum("click", "type", "scroll"),
            "target": obj(
                {
                    "x": {"type": "integer", "minimum": 0, "maximum": 4096},
                    "y": {"type": "integer", "minimum": 0, "maximum": 4096},
                },
                **CLOSED,
            ),
            "text": {"type": ["string", "null"], "maxLength": 20},
        },
        **CLOSED,
    ),
    # Configuration.
    "package": obj(
        {
            "name": {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,15}$"},
            "version": {"type": "string", "pattern": "^[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,2}$"},
            "private": B,
            "scripts": {"type": "object", "additionalProperties": short(12), "maxProperties": 2},
        },
        **CLOSED,
    ),
    "workflow": obj(
        {
            "on": enum("push", "pull_request"),
            "jobs": arr(
                obj(
                    {
                        "runs_on": enum("linux", "windows"),
                        "steps": arr(
                            {
                                "anyOf": [
                                    obj({"uses": short(16)}, **CLOSED),
                                    obj({"run": short(16)}, **CLOSED),
                                ]
                            },
                            minItems=1,
                            maxItems=2,
                        ),
                    },
                    **CLOSED,
                ),
                minItems=1,
                maxItems=1,
            ),
        },
        **CLOSED,
    ),
    "compose": obj(
        {
            "services": {
                "type": "object",
                "additionalProperties": obj(
                    {
                        "image": short(16),
                        "ports": arr({"type": "integer", "minimum": 1, "maximum": 65535}, maxItems=2),
                    },
                    **CLOSED,
                ),
                "minProperties": 1,
                "maxProperties": 2,
            }
        },
        **CLOSED,
    ),
    "geojson": obj(
        {
            "type": {"const": "Feature"},
            "geometry": obj(
                {
                    "type": {"const": "Point"},
                    "coordinates": {
                        "type": "array",
                        "prefixItems": [
                            {"type": "number", "minimum": -180, "maximum": 180},
                            {"type": "number", "minimum": -90, "maximum": 90},
                        ],
                        "items": False,
                        "minItems": 2,
                        "maxItems": 2,
                    },
                },
                **CLOSED,
            ),
            "properties": obj({"name": short(12)}, **CLOSED),
        },
        **CLOSED,
    ),
    "json-rpc": obj(
        {
            "jsonrpc": {"const": "2.0"},
            "id": {"type": ["integer", "string", "null"], "maxLength": 6},
            "method": short(12),
            "params": {"anyOf": [arr(I, maxItems=2), obj({"a": I}, **CLOSED)]},
        },
        ["jsonrpc", "method"],
        **CLOSED,
    ),
}
