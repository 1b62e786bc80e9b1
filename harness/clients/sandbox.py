"""The sandbox of a client: a network with loopback only, a home of its own, and a server to connect to."""

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

# The content of the file that a tool turn reads, or the name of a file that it finds. Only the tool can bring
# it to the model.
MARKER = "HEARTH-4711"
LIMIT_SECONDS = 900
ISOLATED = "SANDBOX_LOOPBACK_ONLY"


def is_isolated():
    """Whether this process runs in the network namespace of `isolate_network`."""
    return ISOLATED in os.environ


def isolate_network():
    """Restarts this program in a network namespace with loopback only."""
    if is_isolated():
        loopback_up()
        return
    unshare = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]
    os.environ[ISOLATED] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])


def loopback_up():
    """Brings the interface `lo` up; a new namespace has no other interface."""
    get, put, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = struct.unpack("16xh", fcntl.ioctl(any_socket, get, struct.pack("16sh", b"lo", 0)))[0]
        fcntl.ioctl(any_socket, put, struct.pack("16sh", b"lo", flags | up))
    if others := [name for _, name in socket.if_nameindex() if name != "lo"]:
        sys.exit(f"the network has more than loopback: {others}")


def die_with_parent():
    """Runs in a child process: the kernel terminates it when the harness exits."""
    set_death_signal, terminate = 1, 15
    ctypes.CDLL(None).prctl(set_death_signal, terminate)


class Server:
    """`hearth serve` on a free port behind a recording proxy; it exits with the harness."""

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
    """The result of one prompt in a client."""

    code: int
    output: str
    errors: str
    seconds: float
    exchanges: list
    # Text that the client must print instead of the model's text, for clients that never print that.
    expected: str = ""

    @property
    def inference_requests(self):
        """The exchanges that generate text."""
        return [exchange for exchange in self.exchanges if exchange.is_inference]

    @property
    def failed_requests(self):
        """Inference requests with a status other than 200."""
        return [exchange for exchange in self.inference_requests if exchange.status != 200]

    def shows(self, text):
        """Whether the client printed `text`, either plain or within JSON."""
        words = " ".join(text.split())[:60]
        return bool(words) and any(
            words in " ".join(shown.split()) for shown in [self.output, *strings(self.output)]
        )


def strings(output):
    """All strings in the JSON of `output`: one document, or one document per line."""
    found = []

    def collect(value):
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            any(collect(inner) for inner in value.values())
        elif isinstance(value, list):
            any(collect(inner) for inner in value)

    for text in [output, *output.splitlines()]:
        try:
            collect(json.loads(text))
        except ValueError:
            continue
    return found


class Sandbox:
    """A new home and work folder for one turn of one client; both are deleted at the end."""

    def __init__(self, folder, name, server, hearth=None, launches=None):
        self.folder, self.name, self.server = folder, name, server
        # The executable whose `launch` starts the client; if None, the client is started itself.
        self.launches = launches
        # The executable whose `connect` configures the client; if None, the client's page does.
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
        """Writes a file below the home; content other than a string is written as JSON."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))

    def run(self, command, variables):
        """Runs the client with no variables of the caller's environment except `PATH`."""
        env = {
            "HOME": str(self.home),
            "PATH": install.path(self.folder, self.name),
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "TERM": "dumb",
            **variables,
        }
        if self.launches:
            command = [self.launches, "launch", self.name, "--url", self.url, "--", *command[1:]]
        self.server.recorder.take()
        started = time.monotonic()
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
                errors += f"\nkilled after {LIMIT_SECONDS} s"
        seconds = time.monotonic() - started
        return Turn(process.returncode, output, errors, seconds, self.server.recorder.take())
