"""What a client runs in: a network with loopback only, a home of its own, and a server that it is pointed at.
"""

import ctypes
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

import install
import recorder

# In the file that a tool turn reads, or the name of one that it finds: it can only reach the model through
# the tool.
MARKER = "HEARTH-4711"
LIMIT_SECONDS = 900
INSIDE = "HEARTH_LOOPBACK_ONLY"


def leave_the_network():
    """Starts this program again in a network namespace that has nothing but loopback."""
    if os.environ.get(INSIDE):
        loopback_up()
        return
    unshare = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]
    os.environ[INSIDE] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])


def loopback_up():
    """Sets the interface `lo` up; nothing else exists in a fresh namespace."""
    get, put, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = struct.unpack("16xh", fcntl.ioctl(any_socket, get, struct.pack("16sh", b"lo", 0)))[0]
        fcntl.ioctl(any_socket, put, struct.pack("16sh", b"lo", flags | up))
    if others := [name for _, name in socket.if_nameindex() if name != "lo"]:
        sys.exit(f"the network has more than loopback: {others}")


def die_with_parent():
    """For a child process: the kernel ends it when the harness ends."""
    set_death_signal, terminate = 1, 15
    ctypes.CDLL(None).prctl(set_death_signal, terminate)


class Server:
    """`hearth serve` on a free port, with a recorder before it; ends with the harness."""

    def __init__(self, hearth, arguments, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(hearth), "serve", "--port", str(port), *arguments]
        self.process = subprocess.Popen(command, stderr=open(log, "w"), preexec_fn=die_with_parent)
        url = f"http://127.0.0.1:{port}/health"
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"the server ended: {pathlib.Path(log).read_text()[-2000:]}")
            try:
                if urllib.request.urlopen(url, timeout=5).status == 200:
                    break
            except OSError:
                time.sleep(0.1)
        self.recorder = recorder.Recorder(port)
        self.url = f"http://127.0.0.1:{self.recorder.port}"


@dataclasses.dataclass
class Turn:
    """What a client did with one prompt."""

    code: int
    output: str
    errors: str
    seconds: float
    exchanges: list
    # What the client must show instead of the model's words, if it shows none of those.
    expects: str = ""

    @property
    def asked(self):
        """Requests that made the model write."""
        return [exchange for exchange in self.exchanges if exchange.infers]

    @property
    def refused(self):
        """Requests to the model that were not answered with 200."""
        return [exchange for exchange in self.asked if exchange.status != 200]

    def shows(self, text):
        """Whether the client printed `text`, plainly or inside of JSON."""
        words = " ".join(text.split())[:60]
        return bool(words) and any(
            words in " ".join(shown.split()) for shown in [self.output, *strings(self.output)]
        )


def strings(output):
    """All strings in the JSON of `output`, which is one document or one a line."""
    found = []

    def walk(value):
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            any(walk(inner) for inner in value.values())
        elif isinstance(value, list):
            any(walk(inner) for inner in value)

    for text in [output, *output.splitlines()]:
        try:
            walk(json.loads(text))
        except ValueError:
            continue
    return found


class World:
    """A fresh home and work folder for one turn of one client; both go when it ends."""

    def __init__(self, folder, name, server, hearth=None):
        self.folder, self.name, self.server = folder, name, server
        # The executable whose `connect` points the client here; without it the client's page does.
        self.hearth = hearth
        self.url = server.url
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="hearth-home-"))
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="hearth-work-"))
        (self.work / "note").write_text(MARKER + "\n")
        (self.work / "notes").mkdir()
        (self.work / "notes" / MARKER).touch()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def write(self, path, content):
        """A file below the home; anything but text is written as JSON."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))

    def run(self, command, variables):
        """Runs the client; it sees nothing of the caller's environment but the search path."""
        env = {
            "HOME": str(self.home),
            "PATH": install.path(self.folder, self.name),
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "TERM": "dumb",
            **variables,
        }
        self.server.recorder.take()
        begun = time.monotonic()
        with subprocess.Popen(
            list(map(str, command)),
            cwd=self.work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent,
        ) as process:
            try:
                output, errors = process.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
                errors += f"\nended after {LIMIT_SECONDS} s"
        return Turn(process.returncode, output, errors, time.monotonic() - begun, self.server.recorder.take())
