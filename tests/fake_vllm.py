"""A server that speaks what we use of vLLM's HTTP interface; its tokens mean nothing. Never used outside of tests.

In a test's own process its attributes are the script; as a program it takes --host and --port, and no notice of the
other options.
"""

import argparse
import json
import os
import socket
import time
from collections import Counter
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.beside import running

EOS = 1
LOGPROB = -0.5


class FakeVLLM(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0, host: str = "127.0.0.1"):
        super().__init__((host, port), _Handler)
        self.key = os.environ.get("VLLM_API_KEY", "")
        self.context = 256
        self.adapters: list[str] = []
        self.processed = True
        self.answers_as = ""
        """The model that answers whatever is asked for."""
        self.seconds = 0.0
        """What a completion takes."""
        self.dead = False
        """Whether its engine is: it drops every completion, and is not healthy."""
        self.refuses = False
        """Whether it refuses every completion."""
        self.changes: dict = {}
        """Of each choice."""
        self.say: list[int] = []
        """Statuses that the next completions are answered with instead."""
        self.asked: list[dict] = []
        """Bodies of the completions that were asked for, but for those of a greeting."""
        self.seen: Counter[str] = Counter()
        """How often each path was asked for."""
        self.withdrawn: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def serving(self) -> AbstractContextManager["FakeVLLM"]:
        return running(self)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeVLLM

    def do_GET(self) -> None:
        self.server.seen[self.path] += 1
        if self.path == "/health":
            self.reply(503 if self.server.dead else 200, {})
        elif self.allowed():
            models = [{"id": "base", "parent": None, "max_model_len": self.server.context}]
            self.reply(200, {"data": models + [{"id": name, "parent": "base"} for name in self.server.adapters]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen[self.path] += 1
        if not self.allowed():
            return
        match self.path:
            case "/v1/load_lora_adapter" if os.path.isdir(body["lora_path"]):
                self.server.adapters.append(body["lora_name"])
                self.reply(200, "loaded")
            case "/v1/unload_lora_adapter":
                self.server.adapters.remove(body["lora_name"])
                self.server.withdrawn.append(body["lora_name"])
                self.reply(200, "unloaded")
            case "/v1/completions":
                self.complete(body)
            case _:
                self.fail(400, "no such adapter")

    def complete(self, body: dict) -> None:
        if self.server.refuses:
            return self.fail(400, "no completions")
        if body["top_k"] != 1:
            self.server.asked.append(body)
            if self.server.dead:
                return self.drop()
            if self.server.say:
                return self.fail(self.server.say.pop(0), "scripted")
        if body["model"] not in ("base", *self.server.adapters):
            return self.fail(404, "no such model")
        time.sleep(self.server.seconds)
        choices = [_choice(body, k, self.server.processed) | self.server.changes for k in range(body.get("n", 1))]
        return self.reply(200, {"model": self.server.answers_as or body["model"], "choices": choices[::-1]})

    def allowed(self) -> bool:
        if not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return True
        self.fail(401, "no key")
        return False

    def fail(self, status: int, message: str) -> None:
        self.reply(status, {"error": {"message": message}})

    def drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


def _choice(body: dict, number: int, processed: bool) -> dict:
    """Two tokens, the first of which tells the prompt's end and the number of the sample."""
    ids = [(body["prompt"][-1] + number) % 250 + 2, EOS][: body["max_tokens"]]
    logprob = 0.0 if body["top_k"] == 1 and processed else LOGPROB
    return {
        "index": number,
        "finish_reason": "stop" if ids[-1] == EOS else "length",
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        "logprobs": {"token_logprobs": [logprob] * len(ids)},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--seconds", type=float, default=0.0)
    options, _ = parser.parse_known_args()
    server = FakeVLLM(options.port, options.host)
    server.seconds = options.seconds
    print("Nobody knows what a server says.", flush=True)
    server.serve_forever()
