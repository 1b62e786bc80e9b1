"""Scores how well planted facts are found: by sort of fact, length, depth and filler.

Values, names and words of the facts are of the held-out split, and half of the fillers are of kinds that training
has not. With --unseen the sentences and questions are worded as training never words them; the sort "wild" is
written by hand in plain English.
Usage: python eval_recall.py DATA_DIR (--work WORK_DIR [--weights q4_k_m|bf16] | --gguf TARGET DRAFT | --url URL)
       [--per 20] [--lengths 256,...] [--out FILE] [--tasks FILE]
"""
import argparse
import collections
import json
import os
import time
import urllib.request

import torch
from tokenizers import Tokenizer

import gen_recall
import recall_facts
import recall_filler
import render
import words
from decode import generate

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16_000)
KINDS = ("attribute", "event", "sentence", "constant", "wild", "two-hops", "several")
SINGLE = KINDS[:5]  # one place of the text is enough
FILLERS = sorted(recall_filler.TRAIN) + sorted(recall_filler.HELD) * 3
WILD = (
    ("The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
     "What is the best thing to do in San Francisco?", "eat a sandwich and sit in Dolores Park"),
    ("The launch code for the Meridian satellite is 8842-ZULU.", "What is the launch code for the Meridian satellite?", "8842-ZULU"),
    ("My sister's cat is called Biscuit.", "What is my sister's cat called?", "Biscuit"),
    ("Dr. Elena Marsh discovered the comet in 1974.", "Who discovered the comet?", "Elena Marsh"),
    ("The wifi password in the cabin is bluefish77.", "What is the wifi password in the cabin?", "bluefish77"),
    ("Our train leaves from platform 9 at 17:45.", "At what time does our train leave?", "17:45"),
    ("The treasure is buried beneath the old oak tree.", "Where is the treasure buried?", "beneath the old oak tree"),
    ("The name of the hidden village is Thornwick.", "What is the name of the hidden village?", "Thornwick"),
    ("The magic number is 73914.", "What is the magic number?", "73914"),
    ("One of the special magic numbers for weary-marble is: 2918475.",
     "What is the special magic number for weary-marble mentioned in the provided text?", "2918475"),
    ("The secret ingredient of the soup is smoked paprika.", "What is the secret ingredient of the soup?", "smoked paprika"),
    ("Agent Kowalski's passphrase is velvet thunder.", "What is Agent Kowalski's passphrase?", "velvet thunder"),
    ("The key to the boathouse hangs on a nail behind the kitchen door.", "Where does the key to the boathouse hang?",
     "behind the kitchen door"),
    ("The captain of the ship was named Isolde Varga.", "What was the name of the captain of the ship?", "Isolde Varga"),
    ("The vault opens with the combination 31-07-64.", "With which combination does the vault open?", "31-07-64"),
    ("def compute_toll(distance):\n    return distance * 4417", "Which constant does compute_toll multiply by?", "4417"),
    ("MAX_RETRY_BUDGET = 6173", "What is the value of MAX_RETRY_BUDGET?", "6173"),
    ("fn warmup_steps() -> u32 {\n    9203\n}", "What does the function warmup_steps return?", "9203"),
    ("Remember: the meeting with the auditors is in room 417.", "In which room is the meeting with the auditors?", "417"),
    ("The project was given the codename Silver Lantern.", "What codename was the project given?", "Silver Lantern"),
    ("The flight number of our trip to Oslo is SK4457.", "What is the flight number of our trip to Oslo?", "SK4457"),
    ("The lighthouse keeper, Mr. Abernathy, owns eleven parrots.", "How many parrots does Mr. Abernathy own?", "eleven"),
    ("The API key for the staging server is sk-9f27aa01.", "What is the API key for the staging server?", "sk-9f27aa01"),
    ("Grandmother's favorite flower was the purple iris.", "What was grandmother's favorite flower?", "purple iris"))


def wild(index):
    said, question, value = WILD[index % len(WILD)]
    return {"kind": "wild", "key": question, "prose": said if "\n" not in said else f"\n{said}\n", "line": said, "code": said,
            "record": {"note": said}, "log": said, "question": question, "value": value, "answer": value,
            "like": recall_facts.attribute_fact}


def make(kind, length, index, tokenizer, passages, unseen=False):
    """One task; the text is made again until the prompt has about `length` tokens."""
    name, depth = FILLERS[(index * 7 + length // 256) % len(FILLERS)], (index % 11) / 10
    chars, best = int(length * 3.2), None
    for _ in range(4):
        w = words.World(f"recall-1/{kind}/{length}/{index}", "heldout")
        w.unseen, think = unseen, w.chance(0.3)
        f = wild(index) if kind == "wild" else recall_facts.two_hops(w) if kind == "two-hops" else recall_facts.several(w) \
            if kind == "several" else recall_facts.fact(w, kind)
        extra = gen_recall.distractions(w, [f], min(8, length // 128))
        single = kind in SINGLE
        text = gen_recall.document(w, max(40, chars), passages, [f], extra, [name], depth if single else None)
        form = w.choice(gen_recall.LEADS)
        messages = [{"role": "user", "content": form.format(d=text, q=f["question"])}]
        prompt = render.text(messages, None, think, generate=True)
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        best = {"id": f"{kind}-{length}-{index}", "kind": kind, "length": length, "depth": depth if single else None, "filler": name,
                "held_filler": name in recall_filler.HELD, "think": think, "messages": messages, "question": f["question"],
                "value": f["value"], "said": [p["prose"] for p in gen_recall.parts_of(f)], "ids": ids}
        if 0.9 * length <= len(ids) <= length:
            break
        chars = int(max(40, chars + (length * 0.96 - len(ids)) * max(1.0, chars / len(ids))))
    return best


def right(task, text):
    values = task["value"] if isinstance(task["value"], list) else [task["value"]]
    said = text.split("</think>")[-1]
    return all(v in said for v in values)


def table(graded):
    """{heading: {cell: [right, number, share]}}."""
    sums = collections.defaultdict(lambda: collections.defaultdict(lambda: [0, 0]))
    for task, good in graded:
        single = task["kind"] in SINGLE
        cells = [("kind", task["kind"])]
        if single:
            cells += [("all single facts", "all"), ("length", str(task["length"])), ("depth", str(task["depth"])), ("filler", task["filler"]),
                      ("fillers", "held out" if task["held_filler"] else "seen"), ("thinking", str(task["think"]))]
        for heading, cell in cells:
            sums[heading][cell][0] += good
            sums[heading][cell][1] += 1
    return {h: {c: [a, b, round(a / b, 4)] for c, (a, b) in cells.items()} for h, cells in sums.items()}


def make_tasks(tokenizer, corpus, per, lengths, kinds=KINDS, unseen=False):
    with open_corpus(corpus) as file:
        entries = [e for e in map(json.loads, file) if e["split"] == "heldout"]
    passages = {"notes": [e["text"] for e in entries if e["source"] == "rust-docs"], "sources": [e["text"] for e in entries]}
    return [make(k, n, i, tokenizer, passages, unseen) for k in kinds for n in lengths for i in range(per)]


def open_corpus(path):
    import lzma
    return lzma.open(path, "rt", encoding="utf-8")


def measure(model, tokenizer, tasks, kind=None, budget=800_000, batch=256, new=160):
    stops = {tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")}
    out = generate(model, [t["ids"] for t in tasks], new, stops, batch, budget, kind)
    texts = [tokenizer.decode([i for i in ids if i not in stops], skip_special_tokens=False) for ids in out]
    return [(t, right(t, x)) for t, x in zip(tasks, texts)], texts


def ask(url, task):
    body = {"messages": task["messages"], "temperature": 0, "max_tokens": 160,
            "chat_template_kwargs": {"enable_thinking": task["think"]}}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("data")
    args.add_argument("--work")
    args.add_argument("--weights", default="q4_k_m", choices=("q4_k_m", "bf16"))
    args.add_argument("--gguf", nargs=2, metavar=("TARGET", "DRAFT"))
    args.add_argument("--url", help="of a server's API, such as http://127.0.0.1:8000/v1")
    args.add_argument("--per", type=int, default=22, help="tasks of each kind and length")
    args.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    args.add_argument("--kinds", default=",".join(KINDS))
    args.add_argument("--unseen", action="store_true", help="statements and questions worded as training never words them")
    args.add_argument("--out")
    args.add_argument("--tasks", help="only write the tasks to this file")
    args.add_argument("--read", help="file of tasks that --tasks wrote")
    args = args.parse_args()
    start = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)
    tokenizer = Tokenizer.from_file(os.path.join(args.data, "tokenizer.json"))
    words.load_common(os.path.join(args.data, "words.json"))
    if args.read:
        with open(args.read, encoding="utf-8") as file:
            tasks = [json.loads(line) for line in file]
    else:
        tasks = make_tasks(tokenizer, os.path.join(args.data, "corpus.jsonl.xz"), args.per, [int(n) for n in args.lengths.split(",")],
                           args.kinds.split(","), args.unseen)
    print(f"{len(tasks)} tasks, {sum(len(t['ids']) for t in tasks)} tokens, {time.time() - start:.1f} s", flush=True)
    if args.tasks:
        with open(args.tasks, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(t, ensure_ascii=False) + "\n" for t in tasks)
        return
    if args.url:
        texts = [ask(args.url, t) for t in tasks]
        graded = [(t, right(t, x)) for t, x in zip(tasks, texts)]
    elif args.gguf:
        from from_gguf import load_pair
        graded, texts = measure(load_pair(*args.gguf)[0].to(device), tokenizer, tasks, torch.float32, 400_000)
    else:
        from shipped import load_target
        graded, texts = measure(load_target(args.work, args.weights, device), tokenizer, tasks)
    report = {"of": args.url or (args.gguf[0] if args.gguf else args.weights), "table": table(graded)}
    print(json.dumps(report["table"]), f"{time.time() - start:.1f} s", flush=True)
    report["wrong"] = [{**{k: t[k] for k in ("id", "filler", "depth", "think", "said", "question", "value")}, "got": x[-300:]}
                       for (t, good), x in zip(graded, texts) if not good][:150]
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
