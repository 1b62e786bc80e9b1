"""Trains a DFlash2 or a DSpark draft on greedy text of the target, and measures its chains.

Reads (or makes) WORK_DIR/self.npz as train_draft.py does; writes WORK_DIR/KIND-bf16-*, KIND.json, KIND-log.jsonl and,
with --measure, KIND-acceptance.json. Usage: python train_draft2.py dflash2|dspark DATA_DIR WORK_DIR [--measure]
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
from draft2 import Dflash2, Draft2Config, Dspark
from optim import Optimiser
from parts import load_parts, save_parts
from shipped import load_target

KINDS = {"dflash2": Dflash2, "dspark": Dspark}
FADE = 4.0     # rows after which a position counts a third
SEED = 31


def first_row(kind):
    """The row that predicts the first drafted token."""
    return 1 if kind == "dflash2" else 0


def batch_of(bucket, batch, c, kind, generator):
    """Features, block ids, anchors, the token before and the label of each predicting row, and the weights."""
    ids, starts, ends, features = bucket
    pick = torch.randint(len(ids), (batch,), generator=generator, device=ids.device)
    span = (ends[pick] - 1 - starts[pick]).clamp_min(1)[:, None]
    anchors = starts[pick][:, None] + (torch.rand(batch, train_draft.ANCHORS, generator=generator, device=ids.device) * span).long()
    at = anchors[..., None] + torch.arange(c.block + 1, device=ids.device)
    inside = at < ends[pick][:, None, None]
    tokens = ids[pick].long().gather(1, at.clamp_max(ids.shape[1] - 1).flatten(1)).view(at.shape)
    block = torch.full_like(tokens[..., :c.block], c.mask_token)
    block[..., 0] = tokens[..., 0]
    n = c.block - first_row(kind)
    weights = torch.exp(-torch.arange(n, device=ids.device) / FADE) * inside[..., 1:n + 1]
    chosen = features[pick] if features.is_cuda else features[pick].float()
    return chosen, block, anchors, tokens[..., :n], tokens[..., 1:n + 1], weights


def loss_of(draft, kind, features, block, anchors, before, labels, weights, embed):
    hidden = draft(features, block, anchors, embed)[:, :, first_row(kind):]
    plain = hidden @ embed.to(hidden.dtype).T
    biased = plain + draft.bias(hidden, before)
    mean = lambda x: (x * weights).sum() / weights.sum()
    entropy = lambda logits: F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none").view(labels.shape)
    right = (biased.argmax(-1) == labels) & (weights > 0)
    loss = mean(entropy(biased))
    if kind == "dflash2":  # the candidates of a row are the best of its own logits
        loss = loss + mean(entropy(plain))
    else:
        guess = draft.confidence(hidden.detach(), before).float()
        loss = loss + 0.1 * mean(F.binary_cross_entropy_with_logits(guess, right.float(), reduction="none"))
    return loss, right.int().cumprod(-1).sum(-1).float().mean()


def train(args, target, c, buckets, device):
    draft = KINDS[args.kind](c).initialise(SEED).to(device)
    optimiser = Optimiser(draft, 0.01, 2e-3, 2e-3)
    embed = target.model.embed_tokens.weight
    sizes = torch.tensor([float(len(b[0])) for b in buckets])
    start = time.time()
    with open(os.path.join(args.work, f"{args.kind}-log.jsonl"), "a") as log:
        for step in range(args.steps):
            cpu, gpu = torch.Generator().manual_seed(SEED + step), torch.Generator(device).manual_seed(SEED + step)
            bucket = buckets[int(torch.multinomial(sizes, 1, generator=cpu))]
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss, kept = loss_of(draft, args.kind, *batch_of(bucket, max(1, args.rows // bucket[0].shape[1]), c, args.kind, gpu), embed)
            loss.backward()
            left = (args.steps - step) / args.steps
            if args.seconds_limit:
                left = min(left, 1 - (time.time() - start) / args.seconds_limit)
            optimiser.step(min(1.0, (step + 1) / 50) * max(0.02, min(1.0, left / 0.6)))
            optimiser.zero_grad()
            if (step + 1) % 50 == 0 or args.steps < 20:
                line = dict(step=step + 1, loss=round(loss.item(), 4), kept=round(kept.item(), 3), length=bucket[0].shape[1],
                            seconds=round(time.time() - start, 1))
                print(json.dumps(line), flush=True)
                log.write(json.dumps(line) + "\n")
            if args.seconds_limit and time.time() - start > args.seconds_limit:
                break
    save_parts({k: v.to(torch.bfloat16) for k, v in draft.state_dict().items()}, os.path.join(args.work, f"{args.kind}-bf16"))
    with open(os.path.join(args.work, f"{args.kind}.json"), "w") as file:
        json.dump(c.as_dict(), file)
    return draft


@torch.no_grad()
def measure(args, target, draft, tokenizer, stops, device):
    """Tokens per step of the reference chain on held-out prompts. Along a right chain the token before is the true one."""
    c, report = draft.c, {}
    for name, prompts in train_draft.held_out_prompts(tokenizer, args.data, args.per_family).items():
        steps = tokens = 0
        for prompt, text in zip(prompts, generate(target, prompts, args.accept_new, stops)):
            whole = list(prompt) + list(text)
            ids = torch.zeros(1, -(-(len(whole) + c.block) // 64) * 64, dtype=torch.long, device=device)
            ids[0, :len(whole)] = torch.tensor(whole)
            features = torch.cat(target(ids, taps=c.taps)[1], -1)
            anchors = torch.arange(len(prompt), len(whole), device=device)[None]
            n = c.block - first_row(args.kind)
            at = anchors[0][:, None] + torch.arange(n, device=device)
            block = torch.full((1, anchors.shape[1], c.block), c.mask_token, dtype=torch.long, device=device)
            block[0, :, 0] = ids[0, anchors[0]]
            hidden = draft(features, block, anchors, target.model.embed_tokens.weight)[0, :, first_row(args.kind):]
            logits, extra = target.head(hidden), draft.bias(hidden, ids[0][at])
            if args.kind == "dflash2":
                best, where = logits.topk(c.top, -1)
                guess = where.gather(-1, (best + extra.gather(-1, where)).argmax(-1, keepdim=True))[..., 0]
            else:
                guess = (logits + extra).argmax(-1)
            right = (guess == ids[0][at + 1]) & (at + 1 < len(whole))
            kept, row = right.int().cumprod(-1).sum(-1).tolist(), 0
            while row + 1 < len(kept):
                steps, tokens, row = steps + 1, tokens + kept[row] + 1, row + kept[row] + 1
        report[name] = {"prompts": len(prompts), "tokens_per_step": round(tokens / max(1, steps), 3)}
        print(name, json.dumps(report[name]), flush=True)
    with open(os.path.join(args.work, f"{args.kind}-acceptance.json"), "w") as file:
        json.dump(report, file, indent=1)


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("kind", choices=KINDS)
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
    c = Draft2Config(target_layers=target.c.layers, taps=Draft2Config.taps if target.c.layers == 12 else (0, 1, 2),
                     mask_token=tokenizer.token_to_id("<|draft_mask|>"))
    pairs = train_draft.self_text(args, target, stops, workers)
    workers.terminate()
    if args.steps:
        draft = train(args, target, c, train_draft.bucket_features(target, pairs, c.taps, device), device)
    else:
        draft = KINDS[args.kind](c).to(device)
        draft.load_state_dict({k: v.float() for k, v in load_parts(os.path.join(args.work, f"{args.kind}-bf16")).items()})
    if args.measure:
        measure(args, target, draft.eval().requires_grad_(False), tokenizer, stops, device)


if __name__ == "__main__":
    main()
