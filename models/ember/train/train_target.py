"""Trains the target: a short-context stage, then a long-context stage; with --from, the stage of recall.

The rate falls linearly over the last part of all steps. From QUANT_FROM on the forward pass sees the weights as
Q4_K_M will round them.

Usage: python train_target.py DATA_DIR WORK_DIR [--from GGUF] [--stage NAME] [--seconds-limit S] [--toy]

WORK_DIR/target.pt is the running checkpoint (weights, optimiser, step); starting again continues from it.
After each stage WORK_DIR/target-bf16-*.safetensors hold the weights in parts of at most 15 MB; with --stage a
single stage starts from those, without the optimiser state of the one before.
"""
import argparse
import json
import os
import time

import torch
import torch.nn.functional as F

import delta
import kquant
from optim import Optimiser
from parts import load_parts, save_parts
from rows import Rows, WEIGHTS
from target import Target, TargetConfig

SEED = 20261120
MIX = {"chat": 22, "prose": 13, "code": 18, "tools": 29, "copy": 18}
STAGES = (
    dict(name="short", seed=SEED, length=2048, batch=32, rows=96, raw=0.10, raw_chars=(1200, 5000), mix=MIX, steps=3200),
    dict(name="long", seed=SEED, length=18432, batch=4, rows=4, raw=0.05, raw_chars=(2000, 20000), agent=0.12,
         agent_chars=(6000, 64000), mix=MIX, steps=440),
)
# Continues a target that has been through the stages above: planted facts at any depth, beside all that it knows.
# One row length, so that everything is compiled once; early rows hold many short documents, later ones long documents.
RECALL_STAGES = (
    dict(name="recall", seed=SEED + 6, length=18432, batch=4, rows=4, raw=0.05, raw_chars=(1200, 8000), agent=0.08,
         agent_chars=(4000, 60000), recall=0.65, dense=0.25, recall_chars=(400, 56000), mix=MIX,
         steps=1300,
         short=dict(share=(0.9, 0.35), raw=0.08, recall_chars=(150, 6500), agent=0.0, dense=0.65)),
)
TOY = (
    dict(name="short", seed=SEED, length=256, batch=2, rows=4, raw=0.2, raw_chars=(300, 800), steps=2),
    dict(name="long", seed=SEED, length=512, batch=1, rows=2, raw=0.1, raw_chars=(300, 800), agent=0.5,
         agent_chars=(2500, 3000), steps=1),
)
WARMUP = 60
DECAY_FROM = 0.50   # share of all steps' tokens after which the rate falls linearly
QUANT_FROM = 0.70   # from here on weights are rounded to their shipped types in the forward pass
FLOOR = 0.02


def rate(done, step, own=None):
    """Schedule factor from the share of the scheduled tokens done; `own`: peak and share of a stage apart."""
    if own:
        return own[0] * min(1.0, (own[1] + 0.001) / 0.03) * max(FLOOR, 1 - own[1])
    warm = min(1.0, (step + 1) / WARMUP)
    return warm * (1.0 if done < DECAY_FROM else max(FLOOR, 1 - (done - DECAY_FROM) / (1 - DECAY_FROM)))


def weighted_loss(hidden, embed, labels, weights):
    """Mean cross-entropy under the token weights, and the plain mean over answers and text."""
    logits = hidden.flatten(0, 1) @ embed.to(hidden.dtype).T
    loss = F.cross_entropy(logits.float(), labels.flatten(), reduction="none")
    w = weights.flatten()
    full = (w == 1.0).float()
    return (loss * w).sum() / w.sum().clamp_min(1), (loss * full).sum() / full.sum().clamp_min(1)


def to_device(ids, classes, device):
    ids = torch.from_numpy(ids.astype("int64"))
    weights = torch.from_numpy(WEIGHTS[classes])
    if device == "cuda":
        ids, weights = ids.pin_memory().cuda(non_blocking=True), weights.pin_memory().cuda(non_blocking=True)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights[:, 1:].contiguous()


def agreed(done, over, ranks, device):
    """The share done and whether the time is over, as the first process sees them: all must take the same steps."""
    if ranks == 1:
        return done, over
    both = torch.tensor([done, float(over)], device=device)
    torch.distributed.broadcast(both, 0)
    done, over = both.tolist()
    return done, bool(over)


def shared_gradients(model, ranks):
    """Averages the gradients over the processes, as one message."""
    grads = [p.grad for p in model.parameters()]
    flat = torch._utils._flatten_dense_tensors(grads)
    torch.distributed.all_reduce(flat)
    flat /= ranks
    for g, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        g.copy_(part)


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("data")
    args.add_argument("work")
    args.add_argument("--seconds-limit", type=float, default=1e9)
    args.add_argument("--workers", type=int, default=12)
    args.add_argument("--save-every", type=int, default=800, help="steps between checkpoints within a stage")
    args.add_argument("--stage")
    args.add_argument("--from", dest="origin", metavar="GGUF", help="start from this shipped target and train recall")
    args.add_argument("--pace", type=float, default=0, help="seconds in which the schedule ends, whatever the machine's speed")
    args.add_argument("--toy", action="store_true")
    args.add_argument("--no-compile", action="store_true")
    args.add_argument("--stages", help="JSON: stage name to fields that differ, for trial runs")
    args.add_argument("--muon-lr", type=float, default=0.02)
    args.add_argument("--adam-lr", type=float, default=2e-3)
    args.add_argument("--embed-lr", type=float, default=3e-3)
    args = args.parse_args()
    start = time.time()
    rows = Rows(args.data, args.workers)  # forks before CUDA starts
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
    if ranks > 1:
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    delta.KERNELS = device == "cuda"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(SEED)
    os.makedirs(args.work, exist_ok=True)
    stages = [{**s, **(json.loads(args.stages) if args.stages else {}).get(s["name"], {})}
              for s in (TOY if args.toy else RECALL_STAGES if args.origin else STAGES)]
    config = TargetConfig(layers=4, ffn=256) if args.toy else TargetConfig()
    model = Target(config).initialise(SEED).to(device)
    optimiser = Optimiser(model, args.muon_lr, args.adam_lr, args.embed_lr)
    quant = kquant.QuantInTheLoop(model, config.layers)
    total = sum(s["steps"] * s["batch"] * s["length"] * ranks for s in stages if "rate" not in s)
    first, checkpoint = 0, os.path.join(args.work, "target.pt")
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        first = saved["step"]
        print(f"continuing at step {first}", flush=True)
    elif args.stage:
        first = sum(s["steps"] for s in stages[:[s["name"] for s in stages].index(args.stage)])
        model.load_state_dict({k: v.float() for k, v in load_parts(os.path.join(args.work, "target-bf16")).items()})
        print(f"stage {args.stage} from the stored weights", flush=True)
    elif args.origin:
        from from_gguf import target_state, tensors
        model.load_state_dict(target_state(tensors(args.origin)[0], config))
        print(f"starting from {args.origin}", flush=True)
    if device == "cuda" and not args.no_compile:
        model.compile()
        loss_of = torch.compile(weighted_loss)
    else:
        loss_of = weighted_loss
    log = open(os.path.join(args.work, "target-log.jsonl") if rank == 0 else os.devnull, "a")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {total / 1e6:.0f} M tokens, "
          f"set up in {time.time() - start:.1f} s", flush=True)
    with open(os.path.join(args.work, "target.json"), "w") as file:
        json.dump(config.as_dict(), file)
    step, tokens = 0, 0

    def save(parts=False):
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}, checkpoint)
            if parts:
                state = {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()}
                save_parts(state, os.path.join(args.work, "target-bf16"))

    for stage in stages:
        size = stage["batch"] * stage["length"] * ranks
        if step + stage["steps"] <= first:
            step, tokens = step + stage["steps"], tokens + stage["steps"] * size
            continue
        base, skip = step, max(0, first - step)
        step, tokens = step + skip, tokens + skip * size
        began, shown = time.time(), 0
        for ids, classes in rows.batches(stage, stage["batch"], skip, stage["steps"] - skip, rank, ranks):
            x, y, w = to_device(ids, classes, device)
            done = tokens / total
            if args.pace:
                done = max(done, (time.time() - start) / args.pace)
            done, over = agreed(done, time.time() - start > args.seconds_limit, ranks, device)
            own = (stage["rate"], (step - base) / stage["steps"]) if "rate" in stage else None
            factor = rate(done, step, own)
            rounded = done >= QUANT_FROM
            if rounded:
                quant.enter()
            with torch.autocast(device, torch.bfloat16):
                hidden, _ = model(x)
                loss, plain = loss_of(hidden, model.model.embed_tokens.weight, y, w)
            loss.backward()
            if ranks > 1:
                shared_gradients(model, ranks)
            if rounded:
                quant.leave()
            optimiser.step(factor)
            optimiser.zero_grad()
            step, tokens, shown = step + 1, tokens + size, shown + 1
            if step % 50 == 0 or step <= 3 or args.toy:
                value = plain.item()
                line = dict(stage=stage["name"], step=step, tokens=tokens, loss=round(value, 4), rate=round(factor, 4),
                            rounded=rounded, seconds=round(time.time() - start, 1),
                            tokens_per_second=round(shown * size / (time.time() - began)))
                print(json.dumps(line), flush=True)
                log.write(json.dumps(line) + "\n")
                log.flush()
                if value != value:
                    raise SystemExit("the loss is not a number")
            if step % args.save_every == 0:
                save()
            if over:
                save(parts=True)
                rows.pool.terminate()
                raise SystemExit(f"time limit reached at step {step}; start again to continue")
        save(parts=True)
    rows.pool.terminate()
    print(f"done in {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
