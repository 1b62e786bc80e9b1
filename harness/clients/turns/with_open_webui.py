"""Open WebUI through the API of its web page: `with_open_webui.py URL plain|streamed|tool` prints the reply.

Starts Open WebUI with a data folder in the home and without accounts; environment variables set the server's
address. The tool turn is a chat in which Open WebUI runs a Python tool.
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


def wait_for(condition, seconds):
    """The first true value of `condition()`; a connection error counts as false."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    sys.exit(f"Open WebUI: no result within {seconds} s")


def run_stored_chat(client):
    """Sends a message in a chat that Open WebUI stores and runs tools for; returns the final message."""
    tool = {"id": "read_note", "name": "read_note", "meta": {"description": "Reads a note"}}
    tool["content"] = TOOL.replace("FOLDER", str(pathlib.Path.cwd()))
    client.post("/api/v1/tools/create", json=tool).raise_for_status()
    user_id, reply_id = str(uuid.uuid4()), str(uuid.uuid4())
    user = {"role": "user", "content": PROMPT}
    message = {**user, "id": user_id, "parentId": None, "childrenIds": [], "models": ["hearth"]}
    request = {
        "model": "hearth",
        "messages": [user],
        "stream": True,
        "parent_id": None,
        "user_message": message,
        "id": reply_id,
        "session_id": "none",
        "tool_ids": ["read_note"],
        "background_tasks": {},
    }
    response = client.post("/api/chat/completions", json=request)
    response.raise_for_status()

    def final_message():
        for chat in client.get("/api/v1/chats/").json():
            messages = client.get(f"/api/v1/chats/{chat['id']}").json()["chat"]["history"]["messages"]
            for each in messages.values():
                if each["role"] == "assistant" and each.get("done"):
                    return each

    return json.dumps(wait_for(final_message, 240))


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
            print(run_stored_chat(client))
            return
        messages = [{"role": "user", "content": "Say hello."}]
        request = {"model": "hearth", "messages": messages, "stream": mode == "streamed"}
        if mode == "plain":
            reply = client.post("/api/chat/completions", json=request)
            print(reply.json()["choices"][0]["message"]["content"])
            return
        with client.stream("POST", "/api/chat/completions", json=request) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event.get("choices") or []]
        print("".join(choice["delta"].get("content") or "" for choice in choices))
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    main()
