"""A relay between a client and the server that keeps what went over the wire.

The client's own words can hide what happened: whether an answer was streamed, whether a tool's result went
back, whether a request was refused and tried again. The relay passes bytes on as they come and notes these
facts.
"""

import dataclasses
import http.client
import http.server
import json
import threading
import time

HOP = {"connection", "transfer-encoding", "keep-alive", "host"}
ENDS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")


@dataclasses.dataclass
class Exchange:
    """One request and what was answered."""

    method: str
    path: str
    body: bytes
    status: int = 0
    streamed: bool = False
    answered: bytes = b""
    # Reads from the server's socket that brought something: more than one means that it came in parts.
    parts: int = 0
    seconds: float = 0.0
    # The client went away before the answer was through.
    left: bool = False

    @property
    def infers(self):
        """Whether the model was asked to write."""
        ends = ("/chat/completions", "/completions", "/messages", "/responses")
        return self.method == "POST" and self.path.split("?")[0].endswith(ends)

    @property
    def whole(self):
        """Whether the answer came through: status 200, and the last event if it was a stream."""
        return self.status == 200 and (not self.streamed or any(end in self.answered for end in ENDS))

    def events(self):
        """The JSON objects of the answer: its events, or the one that it is."""
        for line in self.answered.split(b"\n") if self.streamed else [self.answered]:
            try:
                event = json.loads(line.removeprefix(b"data: "))
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event

    @property
    def said(self):
        """The text that the model wrote, less its reasoning and its calls."""
        text = ""
        for event in self.events():
            for choice in event.get("choices") or []:
                said = choice.get("delta") or choice.get("message") or choice
                text += said.get("content") or said.get("text") or ""
            if event.get("type") == "content_block_delta":
                text += event["delta"].get("text") or ""
            if event.get("type") == "response.output_text.delta":
                text += event["delta"]
            if event.get("type") == "message" or event.get("object") == "response":
                blocks = event.get("content") or [
                    part for item in event["output"] for part in item.get("content") or []
                ]
                text += "".join(block.get("text") or "" for block in blocks)
        return text

    @property
    def prompt_tokens(self):
        """Tokens of the prompt as the answer counts them, or 0."""
        counted = 0
        for said in self.events():
            for place in (said, said.get("message"), said.get("response")):
                usage = (place or {}).get("usage") or {}
                tokens = usage.get("prompt_tokens") or sum(
                    usage.get(key) or 0
                    for key in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
                )
                counted = max(counted, tokens)
        return counted


class Recorder:
    """Relays 127.0.0.1:`port` to the server's port; `exchanges` holds what passed, in order of the requests.
    """

    def __init__(self, server_port):
        self.server_port = server_port
        self.exchanges = []
        self.lock = threading.Lock()
        recorder = self

        class Relay(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def relay(self):
                recorder.relay(self)

            do_GET = do_POST = do_HEAD = do_OPTIONS = do_PUT = do_DELETE = relay

            def log_message(self, *_):
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            def handle_error(self, *_):
                """Ignores clients that reset their idle connections."""

        self.http = Quiet(("127.0.0.1", 0), Relay)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def take(self):
        """What passed since the last call."""
        with self.lock:
            passed, self.exchanges = self.exchanges, []
        return passed

    def relay(self, client):
        length = int(client.headers.get("content-length") or 0)
        body = client.rfile.read(length) if length else read_chunks(client)
        exchange = Exchange(client.command, client.path, body)
        with self.lock:
            self.exchanges.append(exchange)
        begun = time.monotonic()
        server = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=1200)
        try:
            headers = {key: value for key, value in client.headers.items() if key.lower() not in HOP}
            headers["content-length"] = str(len(body))
            server.request(client.command, client.path, body or None, headers)
            answer = server.getresponse()
            exchange.status = answer.status
            exchange.streamed = "text/event-stream" in (answer.getheader("content-type") or "")
            client.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in HOP | {"content-length", "date", "server"}:
                    client.send_header(key, value)
            if exchange.streamed:
                client.send_header("transfer-encoding", "chunked")
                client.end_headers()
                while part := answer.read1(65536):
                    exchange.answered += part
                    exchange.parts += 1
                    client.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    client.wfile.flush()
                client.wfile.write(b"0\r\n\r\n")
            else:
                exchange.answered = answer.read()
                exchange.parts = 1
                client.send_header("content-length", str(len(exchange.answered)))
                client.end_headers()
                client.wfile.write(exchange.answered)
        except (BrokenPipeError, ConnectionResetError):
            exchange.left = True
            client.close_connection = True
        finally:
            exchange.seconds = time.monotonic() - begun
            server.close()


def read_chunks(client):
    """The body of a request sent in chunks, or nothing."""
    if "chunked" not in (client.headers.get("transfer-encoding") or ""):
        return b""
    body = b""
    while size := int(client.rfile.readline().split(b";")[0], 16):
        body += client.rfile.read(size)
        client.rfile.readline()
    client.rfile.readline()
    return body
