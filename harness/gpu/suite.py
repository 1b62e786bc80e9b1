"""Run every GPU test in parallel, longest first, and print a table of results.

    suite.py BIN OUT [--quick] [--lanes N] [--seconds S] [--limit L] [--times FILE] [--only NAME[,NAME...]]
    suite.py --names

BIN has the test binaries of `cuda` by name, and `server_ember`, the one of `server/tests/ember`, of which
the GPU tests run. Each test is a process with its own log in OUT, so that a crash or hang costs no other
test. FILE has a line `seconds binary test` per test. The default is `times` beside this file (one H100, 15
lanes). Unknown tests run first. OUT/times is such a file afterwards. `--quick` runs the tests that the file
`quick` lists: each kernel once, under 60 s on one GPU. After S seconds, or at SIGTERM, running tests are
killed. The process fails unless every test passed. A test that prints SKIPPED has not passed, unless its
name says that it needs a second GPU: `two_gpus`. `--names` prints
the expected binaries. Standard library only.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time

# Most informative first.
BINARIES = (
    "conformance cpu_reference batch_invariance attention attention_batch_invariance fused_layer mtp_kernels "
    "mtp mass gated_delta gated_delta_row gated_delta_chunk moe kv_types page_pool unsupported_plans rows "
    "attention_windows server_ember ember prefill_attention prefill_gemm real_shapes gemm_small_batch gemv "
    "drafts norm driver "
).split()

arguments = argparse.ArgumentParser()
arguments.add_argument("bin", nargs="?")
arguments.add_argument("out", nargs="?")
arguments.add_argument("--names", action="store_true")
arguments.add_argument("--quick", action="store_true")
arguments.add_argument("--lanes", type=int, default=12)
arguments.add_argument("--seconds", type=float, default=3600)
arguments.add_argument("--limit", type=float, default=600)
arguments.add_argument("--times", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "times"))
arguments.add_argument("--only")
args = arguments.parse_args()
if args.out:
    os.makedirs(args.out, exist_ok=True)
if args.names:
    print(" ".join(BINARIES))
    sys.exit()
if not args.out:
    arguments.error("BIN and OUT are needed")
if not os.path.exists(args.times):
    arguments.error(f"--times {args.times}: no such file; omit it for the times beside this script")


quick = None
if args.quick:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "quick")) as file:
        quick = {tuple(line.split()) for line in file if line.strip()}


def tests_of(binary):
    path = os.path.join(args.bin, binary)
    listed = subprocess.run([path, "--list", "--format", "terse"], capture_output=True, text=True).stdout
    names = [line.removesuffix(": test") for line in listed.splitlines() if line.endswith(": test")]
    if quick is not None:
        unknown = sorted(test for own, test in quick if own == binary and test not in names)
        if unknown:
            arguments.error(f"quick names tests that {binary} does not have: {' '.join(unknown)}")
        return [name for name in names if (binary, name) in quick]
    return [name for name in names if binary != "server_ember" or name.startswith("gpu::")]


class Test:
    def __init__(self, binary, name, expected):
        self.binary, self.name, self.expected = binary, name, expected
        self.result, self.seconds, self.process = "not run", 0.0, None
        self.right = ("passed", "skipped") if "two_gpus" in name else ("passed",)
        self.log = os.path.join(args.out, f"{binary}.{name.replace('::', '.')}.txt")

    def run(self):
        begun = time.monotonic()
        command = [
            os.path.join(args.bin, self.binary),
            "--exact",
            self.name,
            "--nocapture",
            "--test-threads",
            "1",
        ]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = self.process.wait(timeout=args.limit)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                code = None
        self.seconds = time.monotonic() - begun
        with open(self.log, errors="replace") as log:
            text = log.read()
        if code is None or over.is_set():
            self.result = "killed"
        elif code != 0 or "1 passed; 0 failed" not in text:
            self.result = "failed"
        else:
            self.result = "skipped" if "SKIPPED" in text else "passed"


def lane():
    while not over.is_set():
        with lock:
            if not waiting:
                return
            test = waiting.pop(0)
        test.run()


def end(*_):
    over.set()
    for test in tests:
        if test.process and test.process.poll() is None:
            test.process.kill()


over, lock = threading.Event(), threading.Lock()
known = {}
with open(args.times) as file:
    for line in file:
        seconds, binary, name = line.split()
        known[binary, name] = float(seconds)
wanted = args.only.split(",") if args.only else list(BINARIES)
if quick is not None:
    wanted = [binary for binary in wanted if any(own == binary for own, _ in quick)]
there = [binary for binary in wanted if os.path.exists(os.path.join(args.bin, binary))]
tests = []
for binary in there:
    # Unknown tests start in the order of BINARIES.
    unknown = 1000.0 - wanted.index(binary)
    tests += [Test(binary, name, known.get((binary, name), unknown)) for name in tests_of(binary)]
waiting = sorted(tests, key=lambda test: -test.expected)
signal.signal(signal.SIGTERM, end)
begun = time.monotonic()
lanes = [threading.Thread(target=lane, daemon=True) for _ in range(args.lanes)]
for thread in lanes:
    thread.start()
while any(thread.is_alive() for thread in lanes):
    if time.monotonic() - begun > args.seconds:
        end()
    time.sleep(0.05)

results = ["passed", "failed", "skipped", "killed", "not run"]
print(f"{'binary':18}" + "".join(f"{result:>9}" for result in results) + f"{'seconds':>9}  longest")
for binary in there:
    own = [test for test in tests if test.binary == binary]
    counts = "".join(f"{sum(test.result == result for test in own):9}" for result in results)
    longest = max(own, key=lambda test: test.seconds)
    print(
        f"{binary:18}{counts}{sum(test.seconds for test in own):9.1f}  {longest.seconds:.1f} {longest.name}"
    )
counts = "".join(f"{sum(test.result == result for test in tests):9}" for result in results)
print(f"{'all':18}{counts}{time.monotonic() - begun:9.1f}  wall, {args.lanes} at once")
for binary in wanted:
    if binary not in there:
        print(f"absent: {binary}")
for test in tests:
    if test.result not in ("passed", "not run"):
        print(f"{test.result}: {test.binary} {test.name} ({test.seconds:.1f} s)")
        if test.result == "failed":
            with open(test.log, errors="replace") as log:
                lines = [line.rstrip() for line in log if line.strip()]
            begins = next((i for i, line in enumerate(lines) if "panicked" in line), max(0, len(lines) - 8))
            print("\n".join(f"    {line[:200]}" for line in lines[begins : begins + 6]))
with open(os.path.join(args.out, "times"), "w") as file:
    for test in sorted(tests, key=lambda test: -test.seconds):
        if test.result == "passed":
            file.write(f"{test.seconds:.1f} {test.binary} {test.name}\n")
sys.stdout.flush()
all_passed = there == wanted and all(test.result in test.right for test in tests)
os._exit(0 if all_passed else 1)
