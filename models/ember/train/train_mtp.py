"""Trains the multi-token-prediction head of the target on its own greedy text, and measures it.

Reads WORK_DIR/self.npz (made by train_draft.py or here); writes WORK_DIR/mtp-bf16-*, mtp-log.jsonl and, with
--measure, mtp-acceptance.json. Usage: python train_mtp.py DATA_DIR WORK_DIR [--steps N] [--measure]
"""
import argparse
import json
import multiprocessing
import os
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import rows
import train_draft
import words
from decode import generate
from mtp import MtpHead
from optim import Optimiser
from parts import load_parts, save_parts
from shipped import load_config, load_target

DEPTH = 4      # steps unrolled in training
FADE = 0.8     # weight of a step against the one before
SEED = 23


def batch_of(bucket, batch, generator):
    ids, starts, ends, hidden = bucket
    pick = torch.randint(len(ids), (batch,), generator=generator, device=ids.device)
    at = torch.arange(ids.shape[1], device=ids.device)
    use = (at >= starts[pick][:, None] - 1) & (at < ends[pick][:, None] - 1)
    return ids[pick].long(), hidden[pick], use


def loss_of(head, ids, hidden, use, embed):
    """Weighted cross-entropy of all steps, and how many steps in a row are right."""
    total, weight, streak, kept = 0.0, 1.0, None, 0.0
    label = ids.roll(-1, 1)
    for s, y in enumerate(head.steps(ids, hidden, embed, DEPTH)):
        # Row p of step s predicts token p + 1; a draft that began at row b is judged at row b + s.
        mine = use if s == 0 else use & F.pad(use, (s, 0))[:, :use.shape[1]]
        logits = (y[mine] @ embed.to(y.dtype).T).float()
        total = total + weight * F.cross_entropy(logits, label[mine])
        right = torch.zeros_like(use)
        right[mine] = logits.argmax(-1) == label[mine]
        streak = right if s == 0 else F.pad(streak, (1, 0))[:, :use.shape[1]] & right
        kept = kept + streak.sum() / use.sum()
        weight *= FADE
    return total, kept


def hidden_buckets(target, pairs, device):
    """As `train_draft.bucket_features`, with the last hidden row after the norm."""
    out = []
    for ids, starts, ends, _ in train_draft.bucket_features(target, pairs, (), device):
        hidden = torch.empty(*ids.shape, target.c.hidden, dtype=torch.bfloat16, device=device)
        chunk = max(1, 131_072 // ids.shape[1])
        for i in range(0, len(ids), chunk):
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                hidden[i:i + chunk] = target(ids[i:i + chunk].long())[0]
        out.append((ids, starts, ends, hidden))
    return out


def train(args, target, buckets, device):
    head = MtpHead(target.c).initialise(SEED).to(device)
    optimiser = Optimiser(head, 0.01, 1e-3, 1e-3)
    embed = target.model.embed_tokens.weight
    sizes = torch.tensor([float(len(b[0])) for b in buckets])
    start = time.time()
    with open(os.path.join(args.work, "mtp-log.jsonl"), "a") as log:
        for step in range(args.steps):
            cpu, gpu = torch.Generator().manual_seed(SEED + step), torch.Generator(device).manual_seed(SEED + step)
            bucket = buckets[int(torch.multinomial(sizes, 1, generator=cpu))]
            ids, hidden, use = batch_of(bucket, max(1, args.rows // bucket[0].shape[1]), gpu)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss, kept = loss_of(head, ids, hidden if device == "cuda" else hidden.float(), use, embed)
            loss.backward()
            left = (args.steps - step) / args.steps
            if args.seconds_limit:
                left = min(left, 1 - (time.time() - start) / args.seconds_limit)
            optimiser.step(min(1.0, (step + 1) / 50) * max(0.02, min(1.0, left / 0.6)))
            optimiser.zero_grad()
            if (step + 1) % 50 == 0 or args.steps < 20:
                line = dict(step=step + 1, loss=round(loss.item(), 4), kept=round(kept.item(), 3), length=ids.shape[1],
                            seconds=round(time.time() - start, 1))
                print(json.dumps(line), flush=True)
                log.write(json.dumps(line) + "\n")
            if args.seconds_limit and time.time() - start > args.seconds_limit:
                break
    save_parts({k: v.to(torch.bfloat16) for k, v in head.state_dict().items()}, os.path.join(args.work, "mtp-bf16"))
    return head


def load_head(work, config, device):
    head = MtpHead(config).to(device)
    head.load_state_dict({k: v.float() for k, v in load_parts(os.path.join(work, "mtp-bf16")).items()})
    return head.eval().requires_grad_(False)


@torch.no_grad()
def measure(args, target, head, tokenizer, stops, device, depth=3):
    """Tokens per step of the greedy chain of `depth` on held-out prompts, by sort of text."""
    report = {}
    for name, prompts in train_draft.held_out_prompts(tokenizer, args.data, args.per_family).items():
        steps = tokens = 0
        for prompt, text in zip(prompts, generate(target, prompts, args.accept_new, stops)):
            whole = list(prompt) + list(text)
            ids = torch.zeros(1, -(-len(whole) // 64) * 64, dtype=torch.long, device=device)
            ids[0, :len(whole)] = torch.tensor(whole)
            hidden = target(ids)[0]
            guess = [target.head(y)[0].argmax(-1).tolist() for y in head.steps(ids, hidden, target.model.embed_tokens.weight, depth)]
            at = len(prompt)
            while at + 1 < len(whole):
                kept = 0
                while kept < depth and at + 1 + kept < len(whole) and guess[kept][at + kept] == whole[at + 1 + kept]:
                    kept += 1
                at, steps, tokens = at + kept + 1, steps + 1, tokens + kept + 1
        report[name] = {"prompts": len(prompts), "depth": depth, "tokens_per_step": round(tokens / max(1, steps), 3)}
        print(name, json.dumps(report[name]), flush=True)
    with open(os.path.join(args.work, "mtp-acceptance.json"), "w") as file:
        json.dump(report, file, indent=1)


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("data")
    args.add_argument("work")
    args.add_argument("--samples", type=int, default=10_000)
    args.add_argument("--steps", type=int, default=900)
    args.add_argument("--rows", type=int, default=24_576)
    args.add_argument("--batch", type=int, default=3072)
    args.add_argument("--new", type=int, default=train_draft.NEW)
    args.add_argument("--workers", type=int, default=12)
    args.add_argument("--seconds-limit", type=float, default=0)
    args.add_argument("--measure", action="store_true")
    args.add_argument("--per-family", type=int, default=40)
    args.add_argument("--accept-new", type=int, default=128)
    args = args.parse_args()
    paths = [os.path.join(args.data, f) for f in ("tokenizer.json", "words.json", "corpus.jsonl.xz")]
    workers = multiprocessing.get_context("fork").Pool(args.workers, rows._start, paths)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)
    tokenizer = Tokenizer.from_file(paths[0])
    words.load_common(paths[1])
    stops = {tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")}
    target = load_target(args.work, "q4_k_m", device)
    pairs = train_draft.self_text(args, target, stops, workers)
    workers.terminate()
    if args.steps:
        train(args, target, hidden_buckets(target, pairs, device), device)
    if args.measure:
        measure(args, target, load_head(args.work, load_config(args.work), device), tokenizer, stops, device)


if __name__ == "__main__":
    main()
