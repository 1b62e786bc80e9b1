"""The sums in our lm-eval tasks."""

import datasets


def load(**_):
    sums = [(a, b) for a in range(12, 16) for b in range(20, 24)]
    rows = [
        {
            "question": f"What is {a} + {b}?",
            "choices": [f" {a + b}", f" {a + b + 11}"],
            "answer": f"{a} + {b} = {a + b}",
        }
        for a, b in sums
    ]
    return {"test": datasets.Dataset.from_list(rows)}
