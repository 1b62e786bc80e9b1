"""Conversations as text, exactly as `chat_template.jinja` renders them, cut where generation begins.

`segments` gives (text, weight) pairs for training: what the assistant wrote has weight 1, all else
PROMPT_WEIGHT. The cuts fall where an inference prompt ends, so that tokens never straddle them.
"""
import json

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
            "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
            "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
            "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>",
            "</tool_response>", "<think>", "</think>", "<|draft_mask|>"]
# These are ordinary text to a reader of the output, as in the published vocabularies.
USER_DEFINED = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
PROMPT_WEIGHT = 0.1
FILLER_WEIGHT = 0.02  # documents of recall samples: long, and nothing to learn in them

TOOLS_HEAD = "# Tools\n\nYou can call these functions:\n\n<tools>"
TOOLS_TAIL = ("\n</tools>\n\nWrite a call like this, one block for each call and nothing after the last:\n\n"
              "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>\n\n"
              "Give every required parameter. If no function fits, say so and answer in words.")


def tool_json(tool):
    return json.dumps(tool, ensure_ascii=False)


def argument_text(value):
    """Objects and arrays as JSON, everything else as Python spells it."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)


def calls_text(calls, after_content):
    out = []
    for i, call in enumerate(calls):
        call = call.get("function", call)
        lead = "\n" if i else "\n\n" if after_content else ""
        params = "".join(f"<parameter={k}>\n{argument_text(v)}\n</parameter>\n" for k, v in call["arguments"].items())
        out.append(f"{lead}<tool_call>\n<function={call['name']}>\n{params}</function>\n</tool_call>")
    return "".join(out)


def segments(messages, tools=None, think=None, generate=False):
    """(text, weight) pairs. `generate` ends with the generation prompt (think False: an empty block)."""
    out, pending = [], []

    def prompt(text):
        pending.append(text)

    def reply(text):
        out.append(("".join(pending), PROMPT_WEIGHT))
        pending.clear()
        out.append((text, 1.0))

    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    if tools:
        head = TOOLS_HEAD + "".join("\n" + tool_json(t) for t in tools) + TOOLS_TAIL
        prompt("<|im_start|>system\n" + head + ("\n\n" + system if system else "") + "<|im_end|>\n")
    elif messages[0]["role"] == "system":
        prompt("<|im_start|>system\n" + system + "<|im_end|>\n")
    last_query = max((i for i, m in enumerate(messages) if m["role"] == "user" and not (
        m["content"].strip().startswith("<tool_response>") and m["content"].strip().endswith("</tool_response>"))),
        default=len(messages))
    for i, m in enumerate(messages):
        if m["role"] == "user":
            prompt("<|im_start|>user\n" + m["content"].strip() + "<|im_end|>\n")
        elif m["role"] == "assistant":
            content = m["content"].strip()
            calls = calls_text(m.get("tool_calls") or [], bool(content))
            if i > last_query:
                reasoning = (m.get("reasoning_content") or "").strip()
                if reasoning:
                    prompt("<|im_start|>assistant\n<think>\n")
                    reply(f"{reasoning}\n</think>\n\n{content}{calls}<|im_end|>")
                else:
                    prompt("<|im_start|>assistant\n<think>\n\n</think>\n\n")
                    reply(f"{content}{calls}<|im_end|>")
            else:
                prompt("<|im_start|>assistant\n")
                reply(f"{content}{calls}<|im_end|>")
            prompt("\n")
        elif m["role"] == "tool":
            if messages[i - 1]["role"] != "tool":
                prompt("<|im_start|>user")
            prompt("\n<tool_response>\n" + m["content"].strip() + "\n</tool_response>")
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                prompt("<|im_end|>\n")
    if generate:
        prompt("<|im_start|>assistant\n" + ("<think>\n\n</think>\n\n" if think is False else "<think>\n"))
    if pending:
        out.append(("".join(pending), PROMPT_WEIGHT))
    return out


def text(messages, tools=None, think=None, generate=False):
    return "".join(part for part, _ in segments(messages, tools, think, generate))
