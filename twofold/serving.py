"""A server for a model of this machine that speaks OpenAI's API, for trying what asks an endpoint without a network.

1. A request for a chat completion waits in a queue.
2. One thread owns the model: it takes all that waits, and answers it as one batch.
3. The draw's seed is the request's digest, so equal requests get equal answers.

It gives texts, one choice each, refuses wishes that it cannot meet, and listens on this machine alone. To serve others,
use vLLM.
"""

import json
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

from twofold import digests
from twofold.records import BASE_POLICY
from twofold.sampling import Completion, Engine, Refusal, SampleRequest
from twofold.seeds import derive

_GATHER = 0.05
"""Seconds that the first request of a batch waits for others."""

_MET = {"messages", "model", "temperature", "top_p", "max_tokens", "seed", "user"}
"""What a request may wish for, beside one choice."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: SampleRequest
    answer: "Future[Completion | Refusal]" = field(default_factory=Future)


class ModelServer(ThreadingHTTPServer):
    """Serves the engine's base model as soon as `serve_forever` runs.

    Args:
        port: 0 takes a free one; `url` tells.
        max_tokens: of an answer, where the request does not say.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, engine: Engine, port: int, max_tokens: int):
        super().__init__(("127.0.0.1", port), _Handler)
        self.engine, self.max_tokens = engine, max_tokens
        self._queue: SimpleQueue[_Waiting] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def complete(self, asked: dict[str, Any]) -> tuple[SampleRequest, Completion | Refusal]:
        """The answer to a chat; may block until the batch before is done.

        Raises:
            ValueError: it wishes for what cannot be met.
        """
        wishes = {name for name, wish in asked.items() if wish and (name, wish) != ("n", 1)}
        if unmet := sorted(wishes - _MET):
            raise ValueError(f"{', '.join(unmet)} cannot be met here. Leave it out.")
        request = SampleRequest(
            prompt_ids=tuple(self.engine.encode(asked["messages"])),
            seed=derive(0, "serve", digests.of_json(asked)),
            temperature=float(asked.get("temperature", 1.0)),
            top_p=float(asked.get("top_p", 1.0)),
            top_k=0,
            max_tokens=int(asked.get("max_tokens", self.max_tokens)),
            policy=BASE_POLICY,
        )
        waiting = _Waiting(request)
        self._queue.put(waiting)
        return request, waiting.answer.result()

    def _work(self) -> None:
        while True:
            batch = [self._queue.get()]
            time.sleep(_GATHER)
            while not self._queue.empty():
                batch.append(self._queue.get())
            try:
                answers = self.engine.sample([one.request for one in batch])
            except Exception as error:  # Theirs, who wait: they must not wait for ever.
                answers = [Refusal("lm_error", str(error))] * len(batch)
            for one, answer in zip(batch, answers, strict=True):
                one.answer.set_result(answer)


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer

    def do_POST(self) -> None:
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": {"message": f"{self.path}: only /v1/chat/completions is served."}})
            return
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request, answer = self.server.complete(asked)
        except (ValueError, KeyError, TypeError) as error:
            self._send(400, {"error": {"message": f"No request for a chat completion: {error!r}"}})
            return
        if isinstance(answer, Refusal):
            self._send(400, {"error": {"message": answer.message, "code": answer.kind}})
            return
        self._send(200, _body(asked.get("model", ""), request, answer))

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: a request's text is its sender's business."""


def _body(model: str, request: SampleRequest, answer: Completion) -> dict[str, Any]:
    asked, said = len(request.prompt_ids), len(answer.token_ids)
    message = {"role": "assistant", "content": answer.text}
    return {
        "id": f"chatcmpl-{request.seed}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "finish_reason": answer.finish_reason, "message": message}],
        "usage": {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said},
    }
