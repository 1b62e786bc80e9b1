"""Table and plot of the answers that `compression.py` collected."""

import collections

COLORS = ("#222222", "#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e")
WIDTH, HEIGHT, LEFT, TOP = 640, 320, 56, 40


def name_of(keep):
    return "full" if keep >= 1.0 else f"keep {keep:g}"


def share(rows, key="right"):
    return sum(bool(row[key]) for row in rows) / len(rows)


def complete(rows):
    """The rows of tasks that every keep ratio has answered, so that all columns compare the same tasks."""
    keeps = {row["keep"] for row in rows}
    of = collections.defaultdict(set)
    for row in rows:
        of[row["id"]].add(row["keep"])
    return [row for row in rows if of[row["id"]] == keeps]


def groups(rows):
    """[(heading, rows)]: by kind, then needles by length, depth and filler."""
    out = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        out.append((kind, [row for row in rows if row["kind"] == kind]))
    for kind in ("four", "hops"):
        of = [row for row in rows if row["kind"] == kind]
        for value in sorted({row["length"] for row in of}):
            out.append((f"{kind}, length {value}", [row for row in of if row["length"] == value]))
    needles = [row for row in rows if row["kind"] == "needle"]
    for key in ("length", "depth", "filler"):
        for value in sorted({row[key] for row in needles}):
            out.append((f"needle, {key} {value}", [row for row in needles if row[key] == value]))
    return out


def table(rows):
    """Markdown: the share of right answers, and of prompts that still have all that is needed."""
    rows = complete(rows)
    keeps = sorted({row["keep"] for row in rows}, reverse=True)
    lines = [
        "| tasks | number | " + " | ".join(map(name_of, keeps)) + " | lost, in points |",
        "| --- | --- |" + " --- |" * len(keeps) + " --- |",
    ]
    for heading, group in groups(rows):
        by = {keep: [row for row in group if row["keep"] == keep] for keep in keeps}
        cells = [
            f"{100 * share(by[k]):.0f} %" + (f" ({100 * share(by[k], 'has_needed'):.0f} %)" if k < 1 else "")
            for k in keeps
        ]
        lost = [f"{100 * (share(by[1.0]) - share(by[k])):.0f}" for k in keeps if k < 1]
        lines.append(f"| {heading} | {len(by[keeps[0]])} | {' | '.join(cells)} | {', '.join(lost)} |")
    return "\n".join(lines)


def losses(rows):
    """Markdown: the tasks that are answered in full and not when compressed, and whether the selection lost them."""
    rows = complete(rows)
    in_full = {row["id"] for row in rows if row["keep"] >= 1.0 and row["right"]}
    lost = [row for row in rows if row["keep"] < 1.0 and row["id"] in in_full and not row["right"]]
    lines = []
    for row in sorted(lost, key=lambda row: (-row["keep"], row["id"])):
        why = "the model" if row["has_needed"] else "the selection"
        lines.append(f"- {row['id']} at keep {row['keep']:g}: lost by {why}")
    return "\n".join(["Right in full and wrong when compressed:", ""] + (lines or ["none"]))


def plot(rows):
    """SVG: right answers by kind and keep ratio."""
    rows = complete(rows)
    keeps = sorted({row["keep"] for row in rows}, reverse=True)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    bottom, wide = HEIGHT - 40, WIDTH - LEFT - 16
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    ]
    for percent in range(0, 101, 25):
        y = bottom - (bottom - TOP) * percent / 100
        out.append(f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{percent} %</text>')
    for i, keep in enumerate(keeps):
        x, color = LEFT + i * 110, COLORS[i % len(COLORS)]
        out.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{color}"/>')
        out.append(f'<text x="{x + 18}" y="22">{name_of(keep)}</text>')
    for j, kind in enumerate(kinds):
        slot = wide / max(1, len(kinds))
        bar = slot * 0.8 / max(1, len(keeps))
        for i, keep in enumerate(keeps):
            of = [row for row in rows if row["kind"] == kind and row["keep"] == keep]
            height = (bottom - TOP) * share(of)
            x = LEFT + j * slot + slot * 0.1 + i * bar
            out.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{bar - 1:.1f}" height="{height:.1f}" '
                f'fill="{COLORS[i % len(COLORS)]}"/>'
            )
        out.append(f'<text x="{LEFT + (j + 0.5) * slot:.1f}" y="{bottom + 18}" text-anchor="middle">{kind}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"
