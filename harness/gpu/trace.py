"""Summarises a trace of harness/gpu/trace.c.

    trace.py TRACE.txt

Kernels: every kind of graph with its launches, grouped by the preceding launch. "adds" is the time from the
preceding launch's end to this one's end, as the median over the later two thirds of the runs. Whole graphs:
their duration, and the times between call, start, end and the end of the wait.
"""

import bisect
import collections
import sys


def median(values):
    return sorted(values)[len(values) // 2] / 1e3


def kernels(records):
    launched = collections.defaultdict(list)
    for kind, correlation, begin, end, name, x, y in records:
        if kind in "KM":
            launched[correlation].append((begin, end, f"{name}:{x}x{y}"))
    graphs = collections.defaultdict(list)
    for run in launched.values():
        if len(run) >= 8:
            run.sort()
            graphs[tuple(name for _, _, name in run)].append(run)
    for names, runs in sorted(graphs.items(), key=lambda graph: -len(graph[1])):
        runs = runs[len(runs) // 3 :]
        total = median([run[-1][1] - run[0][0] for run in runs])
        print(f"## graph of {len(names)} launches, {len(runs)} runs, {total:.1f} us")
        groups = collections.OrderedDict()
        for i, name in enumerate(names):
            before = names[i - 1].split(":")[0] if i else "-"
            groups.setdefault(f"{before} > {name}", []).append(i)

        def of(i, run):
            before = run[i - 1][1] if i else run[i][0]
            return run[i][1] - before, run[i][0] - before, run[i][1] - run[i][0]

        for label, places in groups.items():
            mean = [
                sum(median([of(i, run)[j] for run in runs]) for i in places) / len(places) for j in range(3)
            ]
            adds, starts, lasts = mean
            print(
                f"{len(places):4d} x {label:60s} adds {adds:8.2f} us, {adds * len(places):9.1f} in all;"
                f" starts {starts:7.2f} after the end before, lasts {lasts:8.2f}"
            )


def whole_graphs(records):
    graphs = sorted((b, e, c, name) for kind, c, b, e, name, _, _ in records if kind == "G")
    calls = sorted((b, e, c) for kind, c, b, e, _, _, _ in records if kind == "D")
    call_of = {correlation: (begin, end) for begin, end, correlation in calls}
    begins = [begin for begin, _, _ in calls]
    kinds = collections.defaultdict(list)
    for i, (begin, end, correlation, name) in enumerate(graphs):
        call = call_of.get(correlation)
        if call is None:
            kinds[name].append((end - begin, 0, 0, 0))
            continue
        at = bisect.bisect_left(begins, call[1])
        wait = next((c for c in calls[at : at + 12] if c[1] >= end), (0, end))
        before = graphs[i - 1][1] if i else begin
        kinds[name].append((end - begin, begin - call[0], wait[1] - end, begin - before))
    for name, runs in kinds.items():
        lasts, starts, waits, idle = (median([run[i] for run in runs]) for i in range(4))
        print(
            f"{name}: {len(runs)} runs, lasts {lasts:.1f} us; starts {starts:.1f} after its call and {idle:.1f} after"
            f" the graph before; the wait ends {waits:.1f} after it"
        )


def main():
    records = []
    with open(sys.argv[1]) as lines:
        for line in lines:
            f = line.split()
            records.append((f[0], int(f[1]), int(f[2]), int(f[3]), f[4], f[5], f[6]))
    kernels(records)
    whole_graphs(records)


main()
