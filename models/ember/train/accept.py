"""Acceptance of the draft by simulation: greedy verification follows the target's own greedy text.

Since verification is lossless, the text is known beforehand; the draft is asked at every position, and a
walk over the text counts how many tokens each step would have kept, for the chain and for a tree.
"""
import heapq

import torch


def tree(log_probs, budget, limit):
    """Best-first tree of section 3.1: nodes (parent, depth, rank), root excluded; log_probs [L][K]."""
    heap, order, nodes = [(-log_probs[0][0], 0, -1, 1, 0, log_probs[0][0])], 1, []
    width = len(log_probs[0])
    while heap and len(nodes) < budget:
        _, _, parent, depth, rank, w = heapq.heappop(heap)
        nodes.append((parent, depth, rank))
        me = len(nodes) - 1
        if rank + 1 < width:
            other = w - log_probs[depth - 1][rank] + log_probs[depth - 1][rank + 1]
            heapq.heappush(heap, (-other, order, parent, depth, rank + 1, other))
            order += 1
        if depth < limit:
            child = w + log_probs[depth][0]
            heapq.heappush(heap, (-child, order, me, depth + 1, 0, child))
            order += 1
    return nodes


def walk(nodes, ids, text, at):
    """How many drafted tokens of the tree agree with the text after position `at`."""
    children = {}
    for i, (parent, depth, rank) in enumerate(nodes):
        children.setdefault(parent, []).append((i, ids[depth - 1][rank]))
    here, kept = -1, 0
    while at + 1 + kept < len(text):
        following = next((i for i, t in children.get(here, ()) if t == text[at + 1 + kept]), None)
        if following is None:
            break
        here, kept = following, kept + 1
    return kept


@torch.no_grad()
def tables(target, draft, prompt, text, top=8):
    """Candidates (ids, log-probs) [n, 15, top] of the draft at each position of `text` as root."""
    c = draft.c
    device = next(draft.parameters()).device
    sequence = list(prompt) + list(text)
    length = -(-len(sequence) // 64) * 64
    ids = torch.zeros(1, length, dtype=torch.long, device=device)
    ids[0, :len(sequence)] = torch.tensor(sequence, device=device)
    _, taps = target(ids, taps=c.taps)
    features = torch.cat(taps, -1)
    anchors = torch.arange(len(prompt), len(sequence), device=device)[None]
    block = torch.full((1, anchors.shape[1], c.block), c.mask_token, dtype=torch.long, device=device)
    block[0, :, 0] = ids[0, len(prompt):len(sequence)]
    hidden = draft(features, block, anchors, target.model.embed_tokens.weight)[0, :, 1:]
    log_probs = target.head(hidden).float().log_softmax(-1)
    values, best = log_probs.topk(top, -1)
    return best.tolist(), values.tolist()


def measure(best, values, text, budget=22):
    """Steps and kept tokens over one text: {"chain": (steps, tokens), "tree": ..., "hits": per-depth counts}."""
    out = {}
    last = len(text) - 1
    for name in ("chain", "tree"):
        at, steps = 0, 0
        per_step = []
        while at < last:
            if name == "chain":
                kept = 0
                while kept < 15 and at + 1 + kept <= last and best[at][kept][0] == text[at + 1 + kept]:
                    kept += 1
            else:
                kept = walk(tree(values[at], budget, 15), best[at], text, at)
            per_step.append(kept + 1)
            at += kept + 1
            steps += 1
        out[name] = (steps, sum(per_step))
    hits = [[0, 0] for _ in range(15)]
    for at in range(last):
        for d in range(15):
            if at + 1 + d <= last:
                hits[d][1] += 1
                hits[d][0] += best[at][d][0] == text[at + 1 + d]
    out["hits"] = hits
    return out


def distinct(texts, n=4):
    """Share of distinct n-grams within each text, averaged, and over all texts together."""
    shares, pool, total = [], set(), 0
    for t in texts:
        grams = [tuple(t[i:i + n]) for i in range(len(t) - n + 1)]
        if grams:
            shares.append(len(set(grams)) / len(grams))
            pool.update(grams)
            total += len(grams)
    return sum(shares) / max(1, len(shares)), len(pool) / max(1, total)
