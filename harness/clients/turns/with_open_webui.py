"""Open WebUI over its own API, as its page uses it: `with_open_webui.py URL plain|streamed|tool` prints what the model wrote.

Starts the interface, which its environment points at the server, with a data folder in the home and no accounts. The tool turn is a chat of the interface with a
tool written in Python, which the interface runs.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import uuid

import httpx

mode = sys.argv[2]
PROMPT = "Please read the note with name note"
TOOL = '''
class Tools:
    def read_note(self, name: str) -> str:
        """
        Reads a note
        :param name: Name of the note
        """
        return open(f"FOLDER/{name}").read()
'''


def serve():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "WEBUI_AUTH": "False",
        "DATA_DIR": f"{os.environ['HOME']}/data",
        "WEBUI_SECRET_KEY": "none" * 8,
        "DO_NOT_TRACK": "1",
        "ANONYMIZED_TELEMETRY": "False",
    }
    command = ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=sys.stderr, stderr=sys.stderr)
    return process, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)


def wait_for(what, seconds):
    """The first true value of `what()`; an error of the connection counts as not yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if value := what():
                return value
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    sys.exit(f"nothing within {seconds} s")


def through_a_chat(client):
    """A turn as the page does it: a chat that the interface keeps and runs tools for; its last message."""
    tool = {"id": "read_note", "name": "read_note", "meta": {"description": "Reads a note"}}
    tool["content"] = TOOL.replace("FOLDER", str(pathlib.Path.cwd()))
    client.post("/api/v1/tools/create", json=tool).raise_for_status()
    asked, answer = str(uuid.uuid4()), str(uuid.uuid4())
    message = {"id": asked, "parentId": None, "childrenIds": [], "role": "user", "content": PROMPT, "models": ["hearth"]}
    request = {
        "model": "hearth",
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "parent_id": None,
        "user_message": message,
        "id": answer,
        "session_id": "none",
        "tool_ids": ["read_note"],
        "background_tasks": {},
    }
    begun = client.post("/api/chat/completions", json=request)
    begun.raise_for_status()

    def done():
        for chat in client.get("/api/v1/chats/").json():
            messages = client.get(f"/api/v1/chats/{chat['id']}").json()["chat"]["history"]["messages"]
            for each in messages.values():
                if each["role"] == "assistant" and each.get("done"):
                    return each

    return json.dumps(wait_for(done, 240))


def main():
    process, client = serve()
    try:
        wait_for(lambda: client.get("/health").status_code == 200, 300)
        session = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
        session.raise_for_status()
        client.headers["authorization"] = f"Bearer {session.json()['token']}"
        models = client.get("/api/models").json()["data"]
        assert [model["id"] for model in models if model["id"] == "hearth"], models
        if mode == "tool":
            print(through_a_chat(client))
            return
        request = {"model": "hearth", "messages": [{"role": "user", "content": "Say hello."}], "stream": mode == "streamed"}
        if mode == "plain":
            answer = client.post("/api/chat/completions", json=request)
            print(answer.json()["choices"][0]["message"]["content"])
            return
        with client.stream("POST", "/api/chat/completions", json=request) as stream:
            parts = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        print("".join(choice["delta"].get("content") or "" for part in parts for choice in part.get("choices") or []))
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    main()
