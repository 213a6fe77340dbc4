"""One vLLM server: what it is asked, and how one of our own is started.

1. A server is greeted before it is used: it must be healthy, serve one base model with room for `sampling.context`, and
   give the log-probabilities of the distribution it draws from. For the last, a token is drawn with top-k 1: nothing
   else could be drawn, so its log-probability must be 0.
2. An adapter is loaded before its first sample and must then be listed. Of those that are more than `vllm.adapters` the
   longest unused are unloaded, never one that somebody else has loaded.
"""

import logging
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import httpx

from twofold import leash
from twofold.errors import ModelError, SettingsError
from twofold.records import BASE_POLICY

log = logging.getLogger(__name__)

_PREFIX = "twofold-"
"""Begins the names that adapters are served under; their digest follows."""

_GRACE = 10.0
"""Seconds that a server of ours gets to end by itself."""

_PATIENCE = 120.0
"""Seconds that a server of ours, whose process lives, may leave the question unanswered whether it is healthy."""

_START = 3600.0
"""Seconds that a server of ours may take until it is ready; a large model is read from a slow disk in many minutes."""

_TAIL = 100_000
"""Bytes that hold the last lines of a server's output."""

_BUSY = (408, 409, 429)
"""What a server says that may say something else later, beside 5xx."""


class LostError(Exception):
    """A request got no answer; another server, or the same one later, may give it."""


class UnknownError(LostError):
    """The server has no such adapter."""


class RefusedError(Exception):
    """The server will never answer this request."""


class Server:
    """A server that runs already. Thread-safe.

    Args:
        adapters: how many may be loaded at once.
        timeout: seconds for one answer.
        key: bearer token, if it wants one.
    """

    def __init__(self, url: str, adapters: int, timeout: float, key: str | None = None):
        self.adapters = adapters
        self.timeout = timeout
        self.key = key
        self.base = ""
        """The name that the base model is served under."""
        self.state: Literal["starting", "up", "down"] = "starting"
        self.queue = 0
        """Samples that are on their way."""
        self.trouble = ""
        """Why it is down."""
        self._lock = threading.Lock()
        # The longest unused first, and whether we loaded it.
        self._held: OrderedDict[str, bool] = OrderedDict()
        self._using: Counter[str] = Counter()
        self._connect(url)

    def _connect(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx.Timeout(self.timeout, connect=20.0, pool=None),
            limits=httpx.Limits(max_connections=None),
        )

    def healthy(self) -> bool | None:
        """Whether it says that it is; None when it says nothing."""
        try:
            return self._http.get("/health", timeout=20.0).is_success
        except httpx.TransportError:
            return None

    def open(self) -> None:
        """Make sure that it answers; raises `LostError`."""
        if not self.healthy():
            raise LostError(f"{self.url} does not answer")

    def close(self) -> None:
        """Unload what we loaded."""
        with self._lock:
            for name in list(self._held):
                self._withdraw(name)

    def greet(self, context: int, prompt: Sequence[int]) -> None:
        """See what it serves; `prompt` is any prompt with several likely answers.

        Raises:
            LostError: it does not answer.
            ModelError: it cannot be sampled from; says what to start it with.
        """
        try:
            self._check(context, prompt)
        except RefusedError as error:
            raise ModelError(f"{self.url} answers no completion: {error}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise ModelError(f"{self.url} does not answer as a vLLM server does: {error!r}") from error

    def _check(self, context: int, prompt: Sequence[int]) -> None:
        models = self._models()
        bases = [model for model in models if not model.get("parent")]
        if len(bases) != 1:
            raise ModelError(f"{self.url} serves {len(bases)} base models. Give it one, under one name.")
        if bases[0]["max_model_len"] < context:
            raise ModelError(
                f"{self.url} has room for {bases[0]['max_model_len']} tokens, sampling.context is {context}. "
                f"Start it with --max-model-len {context}."
            )
        self.base = bases[0]["id"]
        with self._lock:
            for gone in self._held.keys() - {model["id"] for model in models}:
                del self._held[gone]
        self._check_logprobs(prompt)

    def complete(self, body: Mapping[str, Any]) -> Any:
        """The answer of the completions endpoint.

        Raises:
            LostError, UnknownError, RefusedError: there is none.
            ModelError: it is no JSON.
            httpx.ReadTimeout: not in time.
        """
        answer = self._send("POST", "/v1/completions", body)
        if answer.status_code == 404:
            raise UnknownError(f"{self.url} has no model {body['model']}")
        if answer.is_client_error:
            raise RefusedError(f"{self.url}: {_message(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise ModelError(f"{self.url} answered a completion with what is no JSON. Is it a vLLM server?") from error

    @contextmanager
    def holding(self, policy: str, adapters: Mapping[str, Path]) -> Iterator[str]:
        """The name that a policy is served under; its adapter stays loaded inside of the block."""
        if policy == BASE_POLICY:
            yield self.base
            return
        name = _PREFIX + policy
        with self._lock:
            if name not in self._held:
                self._publish(name, adapters[policy])
            self._held.move_to_end(name)
            self._using[name] += 1
            self._withdraw_old()
        try:
            yield name
        except UnknownError:
            with self._lock:
                self._held.pop(name, None)
            raise
        finally:
            with self._lock:
                self._using[name] -= 1

    def _publish(self, name: str, folder: Path) -> None:
        """Load an adapter, unless it is there: the name holds its digest."""
        missing = name not in self._names()
        if missing:
            self._load(name, folder)
            if name not in self._names():
                raise LostError(f"{self.url} has loaded {name} and does not list it")
        self._held[name] = missing

    def _load(self, name: str, folder: Path) -> None:
        answer = self._send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        if not answer.is_success:
            raise ModelError(
                f"{self.url} cannot load the adapter {folder.resolve()}: {_message(answer)}. It must see that folder, "
                "be started with --enable-lora and --max-lora-rank of at least weights.lora.r, and have "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment."
            )

    def _withdraw_old(self) -> None:
        spare = [name for name in self._held if not self._using[name]]
        for name in spare[: max(0, len(self._held) - self.adapters)]:
            self._withdraw(name)

    def _withdraw(self, name: str) -> None:
        if self._held.pop(name):
            # One that is gone already, or a server that is: as wished.
            with suppress(LostError, httpx.ReadTimeout):
                self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def _names(self) -> list[str]:
        return [model["id"] for model in self._models()]

    def _models(self) -> list[dict[str, Any]]:
        answer = self._send("GET", "/v1/models")
        if not answer.is_success:
            raise ModelError(f"{self.url} is no vLLM server: /v1/models says {_message(answer)}")
        return answer.json()["data"]

    def _check_logprobs(self, prompt: Sequence[int]) -> None:
        one = {"model": self.base, "prompt": list(prompt), "max_tokens": 1, "temperature": 1.0, "top_k": 1}
        answer = self.complete({**one, "logprobs": 0, "return_token_ids": True})["choices"][0]
        if "token_ids" not in answer:
            raise ModelError(f"{self.url} answers without token ids: its vLLM is too old.")
        if abs(answer["logprobs"]["token_logprobs"][0]) > 1e-3:
            raise ModelError(
                f"{self.url} gives log-probabilities from before temperature, top-p and top-k. "
                "Start it with --logprobs-mode processed_logprobs."
            )

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.ReadTimeout:
            raise
        except httpx.TransportError as error:
            raise LostError(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error
        if answer.status_code in (401, 403):
            raise SettingsError(f"{self.url} does not accept the key. Name the right variable in vllm.key.")
        if answer.is_server_error or answer.status_code in _BUSY:
            raise LostError(f"{self.url}: {_message(answer)}")
        return answer


class OwnServer(Server):
    """A server that we start on this machine, reachable from this machine alone, and that ends with this process.

    Args:
        command: starts it; a free port and a key of its own are added.
        environment: what it needs beside ours.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], adapters: int, timeout: float):
        # Whoever may load adapters may make it read files: other users of the machine may not.
        super().__init__("http://127.0.0.1", adapters, timeout, secrets.token_hex(16))
        self.command = tuple(command)
        self.environment = dict(environment)
        self.process: subprocess.Popen | None = None
        # Without a name, so that nobody has to remove it; what every start of the server says goes on there.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, kept as long as this object

    def open(self) -> None:
        """Start it, unless it runs and is healthy; waits until it is ready.

        Raises:
            ModelError: it ended before it was ready, or isn't within an hour.
        """
        if self._recovers():
            return
        if self.process:
            log.warning("The vLLM server %s is started again; it said last:\n%s", self.url, self._last_words())
        self.close()
        port = _free_port()
        self._connect(f"http://127.0.0.1:{port}")
        self.process = self._start(port)
        if trouble := self._trouble_at_start():
            self.close()
            raise ModelError(f"The vLLM server {trouble}; it said last:\n{self._last_words()}")

    def _trouble_at_start(self) -> str:
        """Wait until it is ready; says why it is not, if so."""
        deadline = time.monotonic() + _START
        while not self.healthy():
            if self.process.poll() is not None:
                return "ended before it was ready"
            if time.monotonic() > deadline:
                return f"was not ready after {_START:g} s"
            time.sleep(0.5)
        return ""

    def close(self) -> None:
        if self.process:
            leash.stop(self.process)

    def _recovers(self) -> bool:
        """Whether it is, or was only slow: a busy machine is no reason to start it again."""
        deadline = time.monotonic() + _PATIENCE
        while self.process and self.process.poll() is None and time.monotonic() < deadline:
            if (said := self.healthy()) is not None:
                return said
            time.sleep(0.2)
        return False

    def _last_words(self) -> str:
        """The last lines of its output, which has a line for each request of a long run."""
        output = self._output.fileno()
        end = os.fstat(output).st_size
        text = os.pread(output, _TAIL, max(0, end - _TAIL)).decode(errors="replace")
        return "\n".join(text.splitlines()[-40:])

    def _start(self, port: int) -> subprocess.Popen:
        command = [*self.command, "--host", "127.0.0.1", "--port", str(port)]
        env = {**os.environ, **self.environment, "VLLM_API_KEY": self.key}
        return leash.start(command, _GRACE, env, stdout=self._output, stderr=subprocess.STDOUT)


def _message(answer: httpx.Response) -> str:
    try:
        said = answer.json()
        return f"{answer.status_code}: {said.get('error', said).get('message', said)}"
    except (ValueError, AttributeError):
        return f"{answer.status_code}: {answer.text[:200]}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
