"""Training rows: samples and text passages, tokenised, packed and weighted, made by worker processes.

A row has length + 1 tokens and begins with a new sample; samples follow each other without a barrier, so that
earlier ones act as distraction. Shard `i` of a stage depends on (seed, stage, i) alone.
"""
import json
import lzma
import multiprocessing
import os
import re

import numpy as np

import gen
import gen_recall
import gen_tools
import render
import words

_state = {}


def _start(tokenizer_path, words_path, corpus_path):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer
    words.load_common(words_path)
    _state["tokenizer"] = Tokenizer.from_file(tokenizer_path)
    passages, notes = [], []
    with lzma.open(corpus_path, "rt", encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            if entry["split"] == "train":
                passages.append(entry["text"])
                if entry["source"] == "rust-docs":
                    notes.append(entry["text"])
    _state["passages"], _state["notes"] = passages, notes
    sizes = np.array([len(p) for p in passages], dtype=np.float64)
    _state["cumulative"] = np.cumsum(sizes) / sizes.sum()


def passage(w, chars):
    """A stretch of real text that begins at a line; sometimes in fill-in-the-middle order."""
    text = _state["passages"][int(np.searchsorted(_state["cumulative"], w.random()))]
    start = w.randint(0, max(0, len(text) - chars))
    if start:
        start = text.find("\n", start) + 1
    text = text[start:start + chars]
    if w.chance(0.06) and len(text) > 200:
        a, b = sorted(w.randint(20, len(text) - 20) for _ in range(2))
        return f"<|fim_prefix|>{text[:a]}<|fim_suffix|>{text[b:]}<|fim_middle|>{text[a:b]}<|endoftext|>"
    return text + "<|endoftext|>"


def encode(parts):
    """Token ids and weight classes (places in CLASSES) of (text, weight) runs."""
    encoded = _state["tokenizer"].encode_batch([t for t, _ in parts], add_special_tokens=False)
    ids = np.concatenate([np.asarray(e.ids, dtype=np.uint16) for e in encoded])
    weights = np.concatenate([np.full(len(e.ids), CLASSES.index(p[1]), dtype=np.uint8) for e, p in zip(encoded, parts)])
    return ids, weights


def log_uniform(w, low, high):
    return int(low * (high / low) ** w.random())


def recall_passages():
    return {"notes": _state["notes"], "sources": _state["passages"]}


def of_row(w, stage, index):
    """The settings of one row: a stage may make a share of its rows from short documents, fewer as it goes on."""
    short = stage.get("short")
    if not short:
        return stage
    first, last = short["share"]
    done = index * stage["rows"] / (stage["steps"] * stage["batch"] * stage.get("ranks", 1))
    return {**stage, **short} if w.chance(first + (last - first) * done) else stage


def sample_parts(w, stage):
    if w.chance(stage["raw"]):
        return [(passage(w, w.randint(*stage["raw_chars"])), 1.0)]
    if stage.get("recall") and w.chance(stage["recall"]):
        return gen_recall.training_parts(w, log_uniform(w, *stage["recall_chars"]), recall_passages(),
                                         stage.get("dense", 0.0))
    if stage.get("agent") and w.chance(stage["agent"]):
        sample = gen_tools.agent_sample(w, w.randint(*stage["agent_chars"]), _state["notes"], answer=0.4)
        return gen.training_parts(sample)
    return gen.training_parts(gen.conversation(w, passages=_state["notes"], mix=stage.get("mix", gen.MIX)))


def make_shard(job):
    """(stage, shard index) -> ids [rows, length + 1] uint16, weight classes alike."""
    stage, index = job
    w = words.World(f"{stage['seed']}/{stage['name']}/{index}")
    length = stage["length"] + 1
    ids, weights = np.zeros((stage["rows"], length), np.uint16), np.zeros((stage["rows"], length), np.uint8)
    for r in range(stage["rows"]):
        at, tries, kind = 0, 0, of_row(w, stage, index)
        while at < length:
            i, c = encode(sample_parts(w, kind))
            if len(i) > length - at > 500 and tries < 8:
                tries += 1  # a long sample would lose its requests, which stand at its end
                continue
            n = min(len(i), length - at)
            ids[r, at:at + n], weights[r, at:at + n] = i[:n], c[:n]
            at += n
    return ids, weights


class Rows:
    """Batches of rows in a fixed order. Start it before the first CUDA call: the workers are forked."""

    def __init__(self, folder, workers):
        paths = (os.path.join(folder, "tokenizer.json"), os.path.join(folder, "words.json"),
                 os.path.join(folder, "corpus.jsonl.xz"))
        self.pool = multiprocessing.get_context("fork").Pool(workers, _start, paths)

    def batches(self, stage, batch, first, count, rank=0, ranks=1):
        """Yields `count` batches (ids, weights) beginning with batch number `first`; a shard is a whole number of batches.

        Of several processes each has its own shards.
        """
        per = stage["rows"] // batch
        assert per * batch == stage["rows"]
        jobs = [({**stage, "ranks": ranks}, i * ranks + rank) for i in range(first // per, (first + count + per - 1) // per)]
        at = first // per * per
        for ids, weights in self.pool.imap(make_shard, jobs):
            for j in range(per):
                if first <= at < first + count:
                    yield ids[j * batch:(j + 1) * batch], weights[j * batch:(j + 1) * batch]
                at += 1


CLASSES = (0.0, render.PROMPT_WEIGHT, 1.0, render.FILLER_WEIGHT)
WEIGHTS = np.array(CLASSES, dtype=np.float32)
