"""A recording proxy between a client and the server.

The client's output can hide whether a response was streamed, a tool result was sent, or a request was refused
and retried. The proxy forwards bytes as they arrive and records these facts.
"""

import dataclasses
import http.client
import http.server
import json
import threading
import time

HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "host"}
LAST_EVENTS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b'"done":true')
STREAMS = ("text/event-stream", "application/x-ndjson")


@dataclasses.dataclass
class Exchange:
    """One request and its response."""

    method: str
    path: str
    body: bytes
    status: int = 0
    streamed: bool = False
    response: bytes = b""
    # Reads from the server's socket that returned data; more than one means that the response came in parts.
    parts: int = 0
    seconds: float = 0.0
    # The client closed the connection before the response ended.
    disconnected: bool = False

    @property
    def is_inference(self):
        """Whether the request generates text."""
        ends = ("/chat/completions", "/completions", "/messages", "/responses", "/api/chat", "/api/generate")
        return self.method == "POST" and self.path.split("?")[0].endswith(ends)

    @property
    def is_complete(self):
        """Whether the response arrived entirely: status 200, and for a stream its last event."""
        return self.status == 200 and (not self.streamed or any(end in self.response for end in LAST_EVENTS))

    def events(self):
        """The JSON objects of the response: the events of a stream, or the one object."""
        for line in self.response.split(b"\n") if self.streamed else [self.response]:
            try:
                event = json.loads(line.removeprefix(b"data: "))
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event

    @property
    def text(self):
        """The model's text, without reasoning and tool calls."""
        text = ""
        for event in self.events():
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or choice.get("message") or choice
                text += delta.get("content") or delta.get("text") or ""
            if "done" in event:
                text += (event.get("message") or {}).get("content") or event.get("response") or ""
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
        """Prompt tokens as the response reports them, or 0."""
        counted = 0
        for event in self.events():
            for holder in (event, event.get("message"), event.get("response")):
                usage = holder.get("usage") or {} if isinstance(holder, dict) else {}
                tokens = usage.get("prompt_tokens") or sum(
                    usage.get(key) or 0
                    for key in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
                )
                counted = max(counted, tokens)
            counted = max(counted, event.get("prompt_eval_count") or 0)
        return counted


class Recorder:
    """Forwards 127.0.0.1:`port` to the server's port and keeps `exchanges` in order of the requests."""

    def __init__(self, server_port):
        self.server_port = server_port
        self.exchanges = []
        self.lock = threading.Lock()
        recorder = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                recorder.forward(self)

            do_GET = do_POST = do_HEAD = do_OPTIONS = do_PUT = do_DELETE = forward

            def log_message(self, *_):
                pass

        class QuietServer(http.server.ThreadingHTTPServer):
            def handle_error(self, *_):
                """Ignores clients that reset their idle connections."""

        self.http = QuietServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def take(self):
        """The exchanges since the last call."""
        with self.lock:
            exchanges, self.exchanges = self.exchanges, []
        return exchanges

    def forward(self, client):
        length = int(client.headers.get("content-length") or 0)
        body = client.rfile.read(length) if length else read_chunks(client)
        exchange = Exchange(client.command, client.path, body)
        with self.lock:
            self.exchanges.append(exchange)
        started = time.monotonic()
        server = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=1200)
        try:
            headers = {key: value for key, value in client.headers.items() if key.lower() not in HOP_BY_HOP}
            headers["content-length"] = str(len(body))
            server.request(client.command, client.path, body or None, headers)
            response = server.getresponse()
            exchange.status = response.status
            exchange.streamed = (response.getheader("content-type") or "").startswith(STREAMS)
            client.send_response(response.status)
            for key, value in response.getheaders():
                if key.lower() not in HOP_BY_HOP | {"content-length", "date", "server"}:
                    client.send_header(key, value)
            if exchange.streamed:
                client.send_header("transfer-encoding", "chunked")
                client.end_headers()
                while part := response.read1(65536):
                    exchange.response += part
                    exchange.parts += 1
                    client.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    client.wfile.flush()
                client.wfile.write(b"0\r\n\r\n")
            else:
                exchange.response = response.read()
                exchange.parts = 1
                client.send_header("content-length", str(len(exchange.response)))
                client.end_headers()
                client.wfile.write(exchange.response)
        except (BrokenPipeError, ConnectionResetError):
            exchange.disconnected = True
            client.close_connection = True
        finally:
            exchange.seconds = time.monotonic() - started
            server.close()


def read_chunks(client):
    """The body of a request with chunked encoding, or no bytes."""
    if "chunked" not in (client.headers.get("transfer-encoding") or ""):
        return b""
    body = b""
    while size := int(client.rfile.readline().split(b";")[0], 16):
        body += client.rfile.read(size)
        client.rfile.readline()
    client.rfile.readline()
    return body
