"""Trains the byte-level BPE vocabulary and lists the frequent words of the training text.

8,192 ids: byte tokens and merges first, then the special tokens of `render.SPECIALS` in their order, so that
ids are dense and every tokenizer reading the table finds them by text. Pre-tokenizer: the qwen35 regex.

Usage: python vocabulary.py CORPUS.jsonl.xz OUT_DIR   (writes tokenizer.json and words.json)
"""
import collections
import json
import lzma
import os
import re
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import gen
import render
import words

SIZE = 8192
SEED = 20_000_000
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
# Merges are learned with punctuation kept apart from letters, so that a word is cut alike after `_`, `/` or `.`;
# the qwen35 regex above, used everywhere else, only rarely joins what this one separates.
LEARNING_PATTERN = PATTERN.replace(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[\p{L}\p{M}]+")
MIX = {"chat": 25, "prose": 17, "code": 25, "tools": 20, "copy": 13}
CHAT_SAMPLES = 40_000
RAW_CHARS = {"rust-src": 3_500_000, "rust-docs": 3_500_000, "python-src": 3_500_000}


def empty(pattern=PATTERN):
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False, fuse_unk=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_specials(tokenizer):
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in render.SPECIALS if t in render.USER_DEFINED])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in render.SPECIALS
                                  if t not in render.USER_DEFINED])
    return tokenizer


def train_texts(corpus):
    with lzma.open(corpus, "rt", encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            if entry["split"] == "train":
                yield entry["source"], entry["text"]


def main():
    corpus, out = sys.argv[1:]
    os.makedirs(out, exist_ok=True)
    counts, texts, left = collections.Counter(), [], dict(RAW_CHARS)
    for source, text in train_texts(corpus):
        counts.update(re.findall(r"\b[a-z]{4,11}\b", text))
        if left[source] > 0:
            texts.append(text)
            left[source] -= len(text)
    common = sorted(w for w, n in counts.most_common(5000) if n >= 20)
    with open(os.path.join(out, "words.json"), "w") as file:
        json.dump(common, file)
    words.COMMON[:] = common
    split_specials = re.compile("|".join(re.escape(s) for s in render.SPECIALS))
    for i in range(CHAT_SAMPLES):
        for part, weight in gen.training_parts(gen.conversation(words.World(SEED + i), mix=MIX)):
            if weight == 1.0 or i % 8 == 0:  # prompts repeat themselves more than answers do
                texts += [t for t in split_specials.split(part) if t]
    trainer = trainers.BpeTrainer(vocab_size=SIZE - len(render.SPECIALS), min_frequency=2, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=16)
    tokenizer = empty(LEARNING_PATTERN)
    tokenizer.train_from_iterator(texts, trainer)
    # Rebuilt with the specials inside the table: the trainer would put them at its beginning.
    table = {**json.loads(empty().to_str()), "model": json.loads(tokenizer.to_str())["model"]}
    vocab = table["model"]["vocab"]
    assert len(vocab) == SIZE - len(render.SPECIALS)
    for i, token in enumerate(render.SPECIALS):
        vocab[token] = SIZE - len(render.SPECIALS) + i
    tokenizer = with_specials(Tokenizer.from_str(json.dumps(table)))
    assert tokenizer.get_vocab_size() == SIZE
    assert all(tokenizer.token_to_id(t) == SIZE - len(render.SPECIALS) + i for i, t in enumerate(render.SPECIALS))
    tokenizer.save(os.path.join(out, "tokenizer.json"))
    size = sum(map(len, texts[-20000:]))
    n = sum(len(e.ids) for e in tokenizer.encode_batch(texts[-20000:]))
    print(f"{len(common)} words, {len(vocab)} tokens, chat {size / n:.2f} characters per token")


if __name__ == "__main__":
    main()
