"""Trains the draft on greedy text of the shipped target, and measures acceptance on held-out prompts.

Steps, each kept in WORK_DIR and skipped when already there:
  self.npz        prompts of the training split with the target's own greedy continuations
  draft.pt        running checkpoint
  draft-bf16-*    the trained draft
  acceptance.json measured acceptance on held-out prompts

Usage: python train_draft.py DATA_DIR WORK_DIR [--samples N] [--steps N] [--measure-only] [--gguf TARGET DRAFT]
"""
import argparse
import json
import lzma
import multiprocessing
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel

import accept
import gen
import gen_recall
import rows
import words
from decode import generate
from draft import Draft, DraftConfig
from optim import Optimiser
from parts import load_parts, save_parts
from shipped import load_config, load_target

SEED = 777_000
NEW = 160
BUCKETS = (256, 1024)
ANCHORS = 24
GAMMA = 7.0
ROWS_PER_STEP = 24_576  # context tokens of a training step
RAW_SHARE = 0.08
EXACT = dict(batch=128, budget=300_000, kind=torch.float32)  # how shipped files are measured
MIX = {"chat": 22, "prose": 25, "code": 31, "tools": 18, "copy": 4}
RECALL_SHARE = 0.12


def make_prompts(job):
    """Prompt ids of `count` training-split samples from `seed` on; some are beginnings of real text."""
    seed, count = job
    out = []
    for i in range(count):
        w = words.World(f"self/{seed}/{i}")
        if w.chance(RAW_SHARE):
            text = rows.passage(w, w.randint(300, 1500)).replace("<|endoftext|>", "")
        elif w.chance(RECALL_SHARE):
            sample = gen_recall.sample(w, w.randint(200, 1800), rows.recall_passages())
            text, _ = gen.task({**sample, "think": w.chance(0.4)})
        else:
            text, _ = gen.task(gen.conversation(w, passages=rows._state["notes"], mix=MIX))
        ids = rows._state["tokenizer"].encode(text, add_special_tokens=False).ids
        if len(ids) + NEW <= BUCKETS[-1]:
            out.append(ids)
    return out


def self_text(args, target, stops, workers):
    """Generates (or reads) prompts and greedy continuations; loops are left out."""
    path = os.path.join(args.work, "self.npz")
    if not os.path.exists(path):
        start = time.time()
        per = min(250, args.samples)
        prompts = [p for ps in workers.map(make_prompts, [(SEED + i, per) for i in range(max(1, args.samples // per))], chunksize=1) for p in ps]
        print(f"{len(prompts)} prompts, {sum(map(len, prompts)) / 1e6:.2f} M tokens, {time.time() - start:.1f} s", flush=True)
        texts = generate(target, prompts, args.new, stops, args.batch, 1_200_000)
        np.savez(path, prompts=np.concatenate([np.array(p, np.uint16) for p in prompts]), prompt_lengths=[len(p) for p in prompts],
                 texts=np.concatenate([np.array(t, np.uint16) for t in texts]), text_lengths=[len(t) for t in texts])
        print(f"{sum(map(len, texts)) / 1e6:.2f} M tokens generated, {time.time() - start:.1f} s", flush=True)
    data = np.load(path)
    cut = lambda flat, lengths: np.split(data[flat], np.cumsum(data[lengths])[:-1])
    pairs = list(zip(cut("prompts", "prompt_lengths"), cut("texts", "text_lengths")))
    return [(p, t) for p, t in pairs if len(t) >= 2 and (len(t) < 40 or accept.distinct([t.tolist()])[0] > 0.5)]


@torch.no_grad()
def bucket_features(target, pairs, taps, device):
    """Per bucket: ids [n, T], prompt and total lengths [n], features [n, T, taps * H] in bf16."""
    out = []
    for at, length in enumerate(BUCKETS):
        low = BUCKETS[at - 1] if at else 0
        mine = [(p, t) for p, t in pairs if low < len(p) + len(t) <= length]
        if not mine:
            continue
        ids = torch.zeros(len(mine), length, dtype=torch.int32)
        for r, (p, t) in enumerate(mine):
            ids[r, :len(p) + len(t)] = torch.from_numpy(np.concatenate([p, t]).astype(np.int32))
        ids = ids.to(device)
        features = torch.empty(len(mine), length, len(taps) * target.c.hidden, dtype=torch.bfloat16, device=device)
        chunk = max(1, 131_072 // length)
        for i in range(0, len(mine), chunk):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                _, kept = target(ids[i:i + chunk].long(), taps=taps)
            if taps:
                features[i:i + chunk] = torch.cat(kept, -1)
        starts = torch.tensor([len(p) for p, _ in mine], device=device)
        ends = torch.tensor([len(p) + len(t) for p, t in mine], device=device)
        out.append((ids, starts, ends, features))
        print(f"bucket {length}: {len(mine)} samples", flush=True)
    return out


def batch_of(bucket, batch, config, generator):
    """Random samples and anchors of one bucket: features, block ids, anchors, labels and their weights."""
    ids, starts, ends, features = bucket
    device = ids.device
    pick = torch.randint(len(ids), (batch,), generator=generator, device=device)
    span = (ends[pick] - 1 - starts[pick]).clamp_min(1)[:, None]
    anchors = starts[pick][:, None] + (torch.rand(batch, ANCHORS, generator=generator, device=device) * span).long()
    at = anchors[..., None] + torch.arange(config.block, device=device)
    inside = at < ends[pick][:, None, None]
    tokens = ids[pick].long().gather(1, at.clamp_max(ids.shape[1] - 1).flatten(1)).view(at.shape)
    block = torch.full_like(tokens, config.mask_token)
    block[..., 0] = tokens[..., 0]
    weights = torch.exp(-torch.arange(config.block - 1, device=device) / GAMMA) * inside[..., 1:]
    chosen = features[pick] if features.is_cuda else features[pick].float()
    return chosen, block, anchors, tokens[..., 1:], weights


def loss_of(draft, features, block, anchors, labels, weights, embed):
    hidden = draft(features, block, anchors, embed)[:, :, 1:]
    logits = hidden.flatten(0, 2) @ embed.to(hidden.dtype).T
    loss = F.cross_entropy(logits.float(), labels.flatten(), reduction="none").view(labels.shape)
    right = (logits.argmax(-1).view(labels.shape) == labels) & (weights > 0)
    steps = right.int().cumprod(-1).sum(-1).float().mean()
    return (loss * weights).sum() / weights.sum(), steps


def train(args, target, config, buckets, device):
    draft = Draft(config).initialise(args.seed)
    if args.origin:  # goes on from an earlier draft of the same shape
        from from_gguf import load_draft
        draft.load_state_dict(load_draft(args.origin).state_dict())
    draft = draft.to(device)
    optimiser = Optimiser(draft, args.muon_lr, 1e-3, 1e-3)
    first, path = 0, os.path.join(args.work, "draft.pt")
    if os.path.exists(path):
        saved = torch.load(path, map_location=device)
        draft.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        first = saved["step"]
    run = loss_of if device == "cpu" or args.no_compile else torch.compile(loss_of)
    embed = target.model.embed_tokens.weight
    sizes = torch.tensor([float(len(b[0])) for b in buckets])
    start = time.time()
    log = open(os.path.join(args.work, "draft-log.jsonl"), "a")
    for step in range(first, args.steps):
        cpu, gpu = torch.Generator().manual_seed(args.seed + step), torch.Generator(device).manual_seed(args.seed + step)
        bucket = buckets[int(torch.multinomial(sizes, 1, generator=cpu))]
        batch = max(1, args.rows // bucket[0].shape[1])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, kept = run(draft, *batch_of(bucket, batch, config, gpu), embed)
        loss.backward()
        left = (args.steps - step) / args.steps
        if args.seconds_limit:  # a machine slower than expected still ends with a small rate
            left = min(left, 1 - (time.time() - start) / args.seconds_limit)
        optimiser.step(min(1.0, (step + 1) / 50) * max(0.02, min(1.0, left / 0.6)))
        optimiser.zero_grad()
        if (step + 1) % 50 == 0 or args.steps < 20:
            line = dict(step=step + 1, loss=round(loss.item(), 4), kept=round(kept.item(), 3), length=bucket[0].shape[1],
                        seconds=round(time.time() - start, 1))
            print(json.dumps(line), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
            if line["loss"] != line["loss"]:
                raise SystemExit("the loss is not a number")
        if args.seconds_limit and time.time() - start > args.seconds_limit:
            print(f"time limit reached at step {step + 1}; start again to continue", flush=True)
            break
    torch.save({"model": draft.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1}, path)
    save_parts({k: v.to(torch.bfloat16) for k, v in draft.state_dict().items()}, os.path.join(args.work, "draft-bf16"))
    with open(os.path.join(args.work, "draft.json"), "w") as file:
        json.dump(config.as_dict(), file)
    return draft


def held_out_prompts(tokenizer, folder, per_family):
    """{family: [prompt ids]}: code and chat with and without thinking, tools, short questions, real code."""
    out = {}
    notes = []
    with lzma.open(os.path.join(folder, "corpus.jsonl.xz"), "rt", encoding="utf-8") as file:
        texts = [(e["source"], e["text"]) for e in map(json.loads, file) if e["split"] == "heldout"]
    for name, family, think in (("code", "code", False), ("chat", "prose", False), ("code-think", "code", True),
                                ("chat-think", "prose", True), ("tools", "tools", None), ("short", "chat", None)):
        out[name] = []
        for i in range(per_family):
            sample = gen.conversation(words.World(f"accept/{name}/{i}", "heldout"), family, think, notes)
            out[name].append(tokenizer.encode(gen.task(sample)[0], add_special_tokens=False).ids)
    sources = [t for s, t in texts if s != "rust-docs"]
    out["raw-code"] = [tokenizer.encode(sources[i % len(sources)][:1200 + 40 * (i // len(sources))], add_special_tokens=False).ids
                       for i in range(min(per_family, 20))]
    return out


def measure(args, target, draft, tokenizer, stops, device):
    """Acceptance per family: tokens per step of chain and tree, hit rate per depth, distinct 4-grams."""
    report = {}
    for name, prompts in held_out_prompts(tokenizer, args.data, args.per_family).items():
        texts = generate(target, prompts, args.accept_new, stops, **(EXACT if args.gguf else {}))
        sums = {"chain": [0, 0], "tree": [0, 0], "hits": np.zeros((15, 2), int)}
        for prompt, text in zip(prompts, texts):
            if len(text) < 2:
                continue
            with sdpa_kernel(SDPBackend.MATH):
                best, values = accept.tables(target, draft, prompt, text)
            one = accept.measure(best, values, text, args.budget)
            for kind in ("chain", "tree"):
                sums[kind][0] += one[kind][0]
                sums[kind][1] += one[kind][1]
            sums["hits"] += np.array(one["hits"])
        own, pooled = accept.distinct([t for t in texts if len(t) >= 16] or texts)
        report[name] = {"prompts": len(prompts), "tokens": sum(map(len, texts)),
                        "chain": round(sums["chain"][1] / max(1, sums["chain"][0]), 3),
                        "tree": round(sums["tree"][1] / max(1, sums["tree"][0]), 3),
                        "hit_rate_by_depth": [round(a / max(1, b), 3) for a, b in sums["hits"].tolist()],
                        "distinct_4_grams": round(own, 3), "distinct_4_grams_pooled": round(pooled, 3)}
        print(name, json.dumps(report[name]), flush=True)
        with open(os.path.join(args.work, "acceptance.json"), "w") as file:
            json.dump(report, file, indent=1)


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("data")
    args.add_argument("work")
    args.add_argument("--samples", type=int, default=10_000)
    args.add_argument("--steps", type=int, default=1700)
    args.add_argument("--rows", type=int, default=ROWS_PER_STEP)
    args.add_argument("--batch", type=int, default=3072)
    args.add_argument("--workers", type=int, default=12)
    args.add_argument("--seed", type=int, default=11)
    args.add_argument("--muon-lr", type=float, default=0.01)
    args.add_argument("--per-family", type=int, default=100)
    args.add_argument("--accept-new", type=int, default=128)
    args.add_argument("--budget", type=int, default=22)
    args.add_argument("--new", type=int, default=NEW)
    args.add_argument("--seconds-limit", type=float, default=0)
    args.add_argument("--no-compile", action="store_true")
    args.add_argument("--from", dest="origin", metavar="GGUF", help="start from this draft")
    args.add_argument("--measure-only", action="store_true")
    args.add_argument("--gguf", nargs=2, metavar=("TARGET", "DRAFT"), help="only measure these files, in f32")
    args.add_argument("--precision", default="highest", choices=("highest", "high"), help="of f32 products with --gguf; high is TF32")
    args.add_argument("--no-measure", action="store_true")
    args = args.parse_args()
    start = time.time()
    paths = [os.path.join(args.data, f) for f in ("tokenizer.json", "words.json", "corpus.jsonl.xz")]
    workers = multiprocessing.get_context("fork").Pool(args.workers, rows._start, paths)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)
    tokenizer = Tokenizer.from_file(paths[0])
    words.load_common(paths[1])
    stops = {tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")}
    if args.gguf:
        from from_gguf import load_pair
        workers.terminate()
        torch.set_float32_matmul_precision(args.precision)
        target, draft = (m.to(device) for m in load_pair(*args.gguf))
        measure(args, target, draft, tokenizer, stops, device)
        return
    target = load_target(args.work, "q4_k_m", device)
    shape = load_config(args.work)
    taps = DraftConfig.taps if shape.layers == 12 else (0, 1, 2)
    config = DraftConfig(target_layers=shape.layers, taps=taps, mask_token=tokenizer.token_to_id("<|draft_mask|>"))
    if args.measure_only:
        draft = Draft(config).to(device)
        draft.load_state_dict({k: v.float() for k, v in load_parts(os.path.join(args.work, "draft-bf16")).items()})
    else:
        pairs = self_text(args, target, stops, workers)
        workers.terminate()
        buckets = bucket_features(target, pairs, taps, device)
        print(f"features ready after {time.time() - start:.1f} s", flush=True)
        draft = train(args, target, config, buckets, device)
        del buckets
        print(f"trained after {time.time() - start:.1f} s", flush=True)
    draft.eval().requires_grad_(False)
    if not args.no_measure:
        measure(args, target, draft, tokenizer, stops, device)
    print(f"done in {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
