"""Several vLLM servers: which one gets a request, and what becomes of those that lose one.

1. Samples of one family (one module of a program) go to one server, which has the beginning of its prompts in its
   cache; but to the server with the shortest queue when the own one's is longer by more than `_MARGIN` samples.
2. A server that lost a request is greeted anew, and one of ours that does not answer is started again first. Requests
   meanwhile go to the others, and wait when there is none. Servers that stay away are tried again at the next batch.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from twofold.errors import ServerError
from twofold.sampling.servers import LostError, Server

log = logging.getLogger(__name__)

_MARGIN = 8
"""Samples by which a queue may be longer than the shortest before a family leaves its server."""


class Fleet:
    """All servers. Thread-safe.

    Args:
        context: tokens that a prompt and its answer may have.
        prompt: any prompt with several likely answers.
    """

    def __init__(self, servers: Sequence[Server], context: int, prompt: Sequence[int]):
        self.servers = tuple(servers)
        self.context = context
        self.prompt = tuple(prompt)
        self.losses = 0
        """Requests that were lost; each was sent again, or ended in an error."""
        self._changed = threading.Condition()
        self._homes: dict[str, Server] = {}
        self._wrong: Exception | None = None
        for server in self.servers:
            self._open(server)

    @contextmanager
    def taking(self, family: str, samples: int) -> Iterator[Server]:
        """A server for so many samples of a family; they count as its queue inside of the block.

        Raises:
            ServerError: none answers, though it did or may.
            TwofoldError: one of them cannot be used as it is.
        """
        with self._changed:
            self._changed.wait_for(self._settled)
            if self._wrong:
                raise self._wrong
            server = self._pick(family)
            server.queue += samples
        try:
            yield server
        finally:
            with self._changed:
                server.queue -= samples

    def lost(self, server: Server, error: LostError) -> None:
        """Take in that a request to a server was lost."""
        with self._changed:
            self.losses += 1
            if server.state != "up":
                return
            server.state = "starting"
        log.warning("A vLLM server lost requests: %s", error)
        self._open(server)

    def revive(self) -> None:
        """Look again at servers that were away."""
        with self._changed:
            away = [server for server in self.servers if server.state == "down"]
            for server in away:
                server.state = "starting"
        for server in away:
            self._open(server)

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def _open(self, server: Server) -> None:
        threading.Thread(target=self._greet, args=(server,), daemon=True).start()

    def _greet(self, server: Server) -> None:
        begin, before = time.monotonic(), server.url
        trouble: Exception | None = None
        try:
            server.open()
            server.greet(self.context, self.prompt)
        except Exception as error:
            trouble = error
        with self._changed:
            server.trouble, server.state = str(trouble), "down" if trouble else "up"
            if not isinstance(trouble, LostError | httpx.ReadTimeout | None):
                self._wrong = trouble
            # A server more to deal the families to.
            self._homes.clear()
            self._changed.notify_all()
        if not trouble and server.url != before:
            log.warning("vLLM server %s is up after %.0f s", server.url, time.monotonic() - begin)

    def _settled(self) -> bool:
        states = {server.state for server in self.servers}
        return self._wrong is not None or "up" in states or "starting" not in states

    def _pick(self, family: str) -> Server:
        up = [server for server in self.servers if server.state == "up"]
        if not up:
            said = "; ".join(f"{server.url}: {server.trouble}" for server in self.servers)
            raise ServerError(f"No vLLM server answers ({said}). Start one, or name others in vllm.base_urls.")
        shortest = min(up, key=lambda server: server.queue)
        home = self._homes.get(family)
        if home not in up:
            home = self._homes[family] = min(up, key=self._families)
        return home if home.queue - shortest.queue <= _MARGIN else shortest

    def _families(self, server: Server) -> tuple[int, int]:
        return sum(home is server for home in self._homes.values()), server.queue
