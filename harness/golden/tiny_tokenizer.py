"""Reduced Qwen tokenizers: the byte tokens and first merges of a published vocabulary."""

import json
import pathlib

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

REGEX = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
CONTROL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
]
PLAIN_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
NORMAL, CONTROL_TYPE, USER_DEFINED = 1, 3, 4


def published(path):
    """Tokens, token types and merges of a published vocabulary file."""
    fields = GGUFReader(path).fields
    return tuple(fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges"))


def reduced(path, size, pre):
    """A vocabulary of `size` tokens; ids follow the published order of merges."""
    tokens, _, merges = published(path)
    n_merges = size - 256 - len(CONTROL) - len(PLAIN_ADDED)
    kept, seen, picked = tokens[:256], set(tokens[:256]), []
    for merge in merges:
        if len(picked) == n_merges:
            break
        left, right = merge.split(" ", 1)
        made = left + right
        if left in seen and right in seen and made not in seen:
            seen.add(made)
            kept = kept + [made]
            picked.append(merge)
    types = [NORMAL] * len(kept) + [CONTROL_TYPE] * len(CONTROL) + [USER_DEFINED] * len(PLAIN_ADDED)
    tokens = kept + CONTROL + PLAIN_ADDED
    assert len(tokens) == size
    return {"pre": pre, "regex": REGEX[pre], "tokens": tokens, "token_type": types, "merges": picked}


def hugging_face(table, nfc=True, match_special=True):
    """The `tokenizers` object of a vocabulary table."""
    vocab = {token: i for i, token in enumerate(table["tokens"])}
    assert len(vocab) == len(table["tokens"])
    tok = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[tuple(m.split(" ", 1)) for m in table["merges"]],
            unk_token=None,
            byte_fallback=False,
            fuse_unk=False,
            ignore_merges=False,
        )
    )
    if nfc:
        tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(table["regex"]), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    if match_special:
        for i, (token, kind) in enumerate(zip(table["tokens"], table["token_type"])):
            if kind == CONTROL_TYPE:
                tok.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif kind == USER_DEFINED:
                tok.add_tokens([AddedToken(token, special=False, normalized=False)])
            assert tok.token_to_id(token) == i
    return tok


def save(table, out, chat_template):
    """Writes the files that the converter and `transformers` read."""
    out = pathlib.Path(out)
    hugging_face(table).save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 4096,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "chat_template": chat_template,
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "special": kind == CONTROL_TYPE,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
            }
            for i, (token, kind) in enumerate(zip(table["tokens"], table["token_type"]))
            if kind != NORMAL
        },
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1))
