"""Scores a target in PyTorch: task quality, bits per byte of held-out text, and what rounding costs.

Usage: python eval_target.py DATA_DIR WORK_DIR [--scale 0.5] [--weights q4_k_m|bf16] [--gguf TARGET DRAFT] [--out FILE]
"""
import argparse
import json
import lzma
import math
import os
import sys
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "..", "harness", "quality"))

import grading
import render
import rows
import tasks
import words
from decode import generate
from shipped import load_target
from train_target import STAGES


def bits_per_byte(model, tokenizer, corpus, device, limit=400):
    """Over held-out files, windows of 2,048 tokens: {source: bits per byte}, and the mean loss over all."""
    sums = {}
    with lzma.open(corpus, "rt", encoding="utf-8") as file:
        entries = [e for e in map(json.loads, file) if e["split"] == "heldout"]
    for e in entries[:limit]:
        text = e["text"][:12_000]
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:2049]
        ids = ids[:(len(ids) - 1) // 64 * 64 + 1]
        if len(ids) < 65:
            continue
        x = torch.tensor([ids], device=device)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden, _ = model(x[:, :-1])
            loss = F.cross_entropy(model.head(hidden)[0].float(), x[0, 1:], reduction="sum").item()
        nbytes = len(tokenizer.decode(ids[1:]).encode())
        a, b, c = sums.get(e["source"], (0.0, 0, 0))
        sums[e["source"]] = (a + loss, b + nbytes, c + len(ids) - 1)
    out = {s: round(a / math.log(2) / b, 4) for s, (a, b, _) in sums.items()}
    return out, sum(a for a, _, _ in sums.values()) / sum(c for _, _, c in sums.values())


def answer_loss(model, folder, device, n=24):
    """Mean loss of the answers in fresh mixed rows of the training kind but unseen seeds."""
    rows._start(*(os.path.join(folder, f) for f in ("tokenizer.json", "words.json", "corpus.jsonl.xz")))
    stage = {**STAGES[0], "name": "unseen", "rows": n, "raw": 0.0}
    ids, classes = rows.make_shard((stage, 0))
    total, count = 0.0, 0
    for r in range(n):
        x = torch.from_numpy(ids[r:r + 1].astype("int64")).to(device)
        full = torch.from_numpy(classes[r, 1:] == 2).to(device)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden, _ = model(x[:, :-1])
            loss = F.cross_entropy(model.head(hidden)[0].float(), x[0, 1:], reduction="none")
        total, count = total + loss[full].sum().item(), count + int(full.sum())
    return total / count


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("data")
    args.add_argument("work")
    args.add_argument("--scale", type=float, default=1.0)
    args.add_argument("--weights", default="q4_k_m", choices=("q4_k_m", "bf16"))
    args.add_argument("--kinds", default=",".join(tasks.COUNTS))
    args.add_argument("--new", type=int, default=320)
    args.add_argument("--batch", type=int, default=512)
    args.add_argument("--no-losses", action="store_true")
    args.add_argument("--gguf", nargs=2, metavar=("TARGET", "DRAFT"), help="score these files in f32, without the losses")
    args.add_argument("--precision", default="high", choices=("highest", "high"), help="of f32 products; high is TF32")
    args.add_argument("--out")
    args = args.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision(args.precision)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it fails on some prompt lengths
    start = time.time()
    tokenizer = Tokenizer.from_file(os.path.join(args.data, "tokenizer.json"))
    words.load_common(os.path.join(args.data, "words.json"))
    corpus = os.path.join(args.data, "corpus.jsonl.xz")
    if args.gguf:
        from from_gguf import load_pair
        model = load_pair(*args.gguf)[0].to(device)
    else:
        model = load_target(args.work, args.weights, device)
    report = {"weights": args.gguf[0] if args.gguf else args.weights}
    if not args.no_losses and not args.gguf:
        for kind in ("bf16", "q4_k_m"):
            other = model if kind == args.weights else load_target(args.work, kind, device)
            bpb, raw = bits_per_byte(other, tokenizer, corpus, device)
            answers = answer_loss(other, args.data, device)
            report[kind] = {"bits_per_byte": bpb, "text_perplexity": round(math.exp(raw), 4), "answer_perplexity": round(math.exp(answers), 4)}
        for what in ("text_perplexity", "answer_perplexity"):
            report[f"{what}_ratio"] = round(report["q4_k_m"][what] / report["bf16"][what], 4)
        print(json.dumps(report), f"{time.time() - start:.1f} s", flush=True)
    notes = tasks.notes_of(corpus)
    wanted = args.kinds.split(",")
    todo = [t for t in tasks.all_tasks(args.scale, notes) if t["kind"] in wanted]
    prompts = [tokenizer.encode(render.text(t["messages"], t["tools"], t["think"], generate=True), add_special_tokens=False).ids for t in todo]
    stops = {tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")}
    exact = dict(budget=400_000, kind=torch.float32) if args.gguf else {}
    texts = generate(model, prompts, args.new, stops, args.batch, **exact)
    grades, wrong = [], []
    for task, prompt, ids in zip(todo, prompts, texts):
        text = tokenizer.decode([i for i in ids if i not in stops], skip_special_tokens=False)
        grade = grading.grade(task, text)
        grades.append((task, grade))
        if not grade["right"]:
            wrong.append({"id": task["id"], "asked": task["messages"][-1]["content"][-300:], "expect": task["expect"], "got": text[-600:]})
    report["tasks"] = grading.table(grades)
    long = [len(p) for t, p in zip(todo, prompts) if t["kind"] == "tool-long"]
    if long:
        report["long_prompt_tokens"] = {"least": min(long), "most": max(long)}
    print(json.dumps(report["tasks"], indent=0), f"{time.time() - start:.1f} s", flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({**report, "wrong": wrong[:120]}, file, indent=1)


if __name__ == "__main__":
    main()
