"""Servers for `compression.py`: one per keep ratio, on one device."""

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request

# Tokens beyond the longest text: template, question, tools and reply.
BESIDE_TEXT = 4096
START_SECONDS = 240


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(server, url, log):
    begun = time.time()
    while time.time() - begun < START_SECONDS:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url + "/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    with open(log, encoding="utf-8", errors="replace") as file:
        raise SystemExit(f"the server at {url} did not start; its log:\n{file.read()[-4000:]}")


@contextlib.contextmanager
def serving(hearth, model, scorer, keeps, device, longest, parallel, folder):
    """[(keep ratio, URL)] of servers that end with the block. Their logs lie in `folder`.

    `model` None is the bundled model; another has its trained context. Without `scorer`, the model scores itself.
    """
    if model:
        beside = [model]
    else:
        beside = ["--max-ctx", str(longest + BESIDE_TEXT)]
    if scorer:
        beside += ["--prefill-drafter", scorer]
    servers, found = [], []
    try:
        for keep in keeps:
            port = free_port()
            command = [hearth, "serve", *beside, "--port", str(port), "--device", device]
            command += ["--max-sequences", str(parallel)]
            command += ["--prefill-compression", "always", "--prefill-keep-ratio", str(keep)]
            log = os.path.join(folder, f"server-{keep:g}.log")
            with open(log, "wb") as file:
                server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            servers.append(server)
            # One after the other: the first fills the cache of compiled kernels.
            wait_until_ready(server, f"http://127.0.0.1:{port}", log)
            found.append((keep, f"http://127.0.0.1:{port}"))
        yield found
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(timeout=60)
