"""Requests of one session that run or have just been answered: retries get the same answer.

Two requests with the same body are two samples, unless the client marks the second one as a retry,
or nobody has read the first one's answer because its client went away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from mppo.agents.endpoint.ask import HttpReply
from mppo.agents.endpoint.refusal import Refusal

_REMEMBERED = 64
"""Answered calls of a session that a retry can ask for again."""


class ClientGone(Exception):
    """The client closed the connection before its answer."""


@dataclass(eq=False)
class Call:
    """A request, and the task that makes its answer; ``readers`` clients wait for it, and it
    ``is_read`` once one has got it."""

    digest: bytes
    task: asyncio.Task[HttpReply]
    readers: int = 0
    is_read: bool = False


class Calls:
    """The requests of a session. An answer waits ``retry_s`` seconds for a retry after its client
    is gone; ``forget`` is called with one that nobody will read."""

    def __init__(
        self, most_running: int, retry_s: float, forget: Callable[[HttpReply], None]
    ) -> None:
        self._most_running, self._retry_s, self._forget = most_running, retry_s, forget
        self._calls: list[Call] = []
        self.is_closed = False

    async def serve(
        self,
        digest: bytes,
        is_retry: bool,
        work: Callable[[], Coroutine[Any, Any, HttpReply]],
        gone: Callable[[], Awaitable[Any]],
    ) -> HttpReply:
        """The answer to a request, which ``work`` makes.

        ``digest``: of route and body; ``is_retry``: the client says that it has sent it before;
        ``gone``: returns when the client closes the connection, which raises ClientGone. Refusal
        from ``work``, for too many calls, or after the session's end.
        """
        call = self._known(digest, is_retry) or self._begin(digest, work)
        call.readers += 1
        leaves = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({call.task, leaves}, return_when=asyncio.FIRST_COMPLETED)
            if leaves.done():
                raise ClientGone
            if call.task.cancelled():
                raise ended()
            reply = call.task.result()
            call.is_read = True
            return reply
        finally:
            leaves.cancel()
            call.readers -= 1
            if not call.is_read:
                asyncio.get_running_loop().call_later(self._retry_s, self._drop_unread, call)

    def _known(self, digest: bytes, is_retry: bool) -> Call | None:
        same = [call for call in self._calls if call.digest == digest]
        unread = [call for call in same if not call.is_read and not call.readers]
        return next(iter(unread or (same[::-1] if is_retry else ())), None)

    def _begin(self, digest: bytes, work: Callable[[], Coroutine[Any, Any, HttpReply]]) -> Call:
        if self.is_closed:
            raise ended()
        running = sum(not call.task.done() for call in self._calls)
        if running >= self._most_running:
            why = f"the session has {running} requests at the same time: wait for an answer"
            raise Refusal(429, why)
        call = Call(digest, asyncio.ensure_future(work()))
        call.task.add_done_callback(lambda task: self._done(call))
        self._calls.append(call)
        read = [each for each in self._calls if each.is_read]
        for old in read[: len(read) - _REMEMBERED]:
            self._calls.remove(old)
        return call

    def _done(self, call: Call) -> None:
        """Forget a call that failed: a retry tries again."""
        if (call.task.cancelled() or call.task.exception()) and call in self._calls:
            self._calls.remove(call)

    def _drop_unread(self, call: Call) -> None:
        if call.readers or call.is_read or call not in self._calls:
            return
        self._calls.remove(call)
        if call.task.done():
            self._forget(call.task.result())
        else:
            call.task.cancel()

    async def close(self) -> None:
        """Cancel what runs, and forget what nobody has read."""
        self.is_closed = True
        running = [call.task for call in self._calls if not call.task.done()]
        for call in list(self._calls):
            call.readers = 0
            self._drop_unread(call)
        self._calls.clear()
        if running:
            await asyncio.wait(running)


def ended() -> Refusal:
    return Refusal(409, "the session has ended", retry=False)
