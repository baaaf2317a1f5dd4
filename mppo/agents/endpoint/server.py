"""The endpoint: an HTTP server in the training process, where agents reach the policy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from mppo.agents.endpoint.anthropic_messages import answer_messages, count_tokens
from mppo.agents.endpoint.ask import HttpReply
from mppo.agents.endpoint.calls import ClientGone
from mppo.agents.endpoint.chat import answer_chat, answer_completion
from mppo.agents.endpoint.messages import read_messages, read_tools
from mppo.agents.endpoint.openai_responses import answer_response
from mppo.agents.endpoint.refusal import INVALID_KEY, Refusal, invalid
from mppo.agents.endpoint.session import Session
from mppo.agents.endpoint.sessions import EpisodeRecord, Sessions, same
from mppo.rollout.turns import EngineLost
from mppo.safety.foreign_text import quoted
from mppo.safety.input_error import InputError
from mppo.safety.input_files import parse_json

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as missing:
    fix = 'pip install "mppo[agents]"'
    raise InputError(f"the endpoint of agents needs starlette and uvicorn: {fix}") from missing

_BODY_S = 60.0
"""Seconds in which a client must send the body of a request."""
_IDLE_S, _STOP_S = 3600, 2
"""Seconds in which a client may send its next request, and in which open connections must end."""
_RETRY_COUNT, _IDEMPOTENT = "x-stainless-retry-count", "idempotency-key"

ApiAnswer = Callable[[Session, Mapping[str, Any]], Coroutine[Any, Any, HttpReply]]
_APIS: dict[str, ApiAnswer] = {
    "chat/completions": answer_chat,
    "completions": answer_completion,
    "responses": answer_response,
    "messages": answer_messages,
    "messages/count_tokens": count_tokens,
}
"""Answers by the path behind ``/v1/``."""
Handler = Callable[[Request], Awaitable[Response]]


class Endpoint:
    """An HTTP server on which agents reach the policy, by default at a free port of the loopback
    address: traffic is not encrypted. ``admin_key`` opens and closes sessions; empty: a random one.
    """

    def __init__(
        self, sessions: Sessions, host: str = "127.0.0.1", port: int = 0, admin_key: str = ""
    ) -> None:
        self._sessions, self._host, self._port = sessions, host, port
        self.admin_key = admin_key or secrets.token_urlsafe(24)
        self.url = ""
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen in this event loop; InputError if the address cannot be listened on."""
        listener = _listen(self._host, self._port)
        port = listener.getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = self._sessions.url = f"http://{host}:{port}"
        config = uvicorn.Config(
            self.app(),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            timeout_keep_alive=_IDLE_S,
            server_header=False,
            timeout_graceful_shutdown=_STOP_S,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        await self._sessions.end_all()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = self._task = None

    def app(self) -> Starlette:
        routes = [
            Route("/health", _checked(self._health), methods=["GET"]),
            Route("/sessions", _checked(self._open), methods=["POST"]),
            Route("/sessions/{id}", _checked(self._delete), methods=["DELETE"]),
            Route("/sessions/{id}/reward_info", _checked(self._reward), methods=["POST"]),
        ]
        for start in ("", "/sessions/{id}"):
            models = Route(f"{start}/v1/models", _checked(self._models), methods=["GET"])
            routes.append(models)
            for path, answer in _APIS.items():
                handler = _checked(self._answers(path, answer))
                routes.append(Route(f"{start}/v1/{path}", handler, methods=["POST"]))
        handlers = {404: _not_found, 405: _not_found}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _open(self, request: Request) -> Response:
        if not same(_token(request), self.admin_key):
            raise Refusal(401, "only the owner of the endpoint opens sessions", INVALID_KEY)
        content = parsed(await self._body(request) or b"{}")
        messages, tools = content.get("messages") or [], content.get("tools") or []
        if not isinstance(messages, list) or not isinstance(tools, list):
            raise invalid("messages and tools are lists")
        messages, tools, token_ids = read_messages(messages), read_tools(tools), None
        if messages:
            token_ids = await self._sessions.policy.prompts.opening(messages, tools)
        session = self._sessions.open(messages, tools, token_ids)
        found = {"id": session.id, "base_url": session.base_url, "key": session.key}
        return JSONResponse(found, 201)

    async def _delete(self, request: Request) -> Response:
        name = request.path_params["id"]
        if same(_token(request), self.admin_key):
            return JSONResponse(record_json(await self._sessions.close(name)))
        session = self._session(request)
        await session.end()
        return JSONResponse({"id": session.id, "turns": len(session.tree)})

    async def _reward(self, request: Request) -> Response:
        session = self._session(request)
        content = parsed(await self._body(request))
        session.report(content.get("reward"), content.get("numbers"))
        return JSONResponse({"reward": session.reward, "numbers": session.numbers})

    async def _models(self, request: Request) -> Response:
        session = self._session(request)
        model = {"id": session.policy.model, "object": "model", "created": 0, "owned_by": "mppo"}
        limits = session.policy.limits
        model["max_model_len"] = limits.context_tokens
        return JSONResponse({"object": "list", "data": [model]})

    def _answers(self, path: str, answer: ApiAnswer) -> Handler:
        async def handler(request: Request) -> Response:
            session = self._session(request)
            body = await self._body(request)
            content = parsed(body)
            key = request.headers.get(_IDEMPOTENT, "")
            retries = request.headers.get(_RETRY_COUNT, "0")
            digest = hashlib.sha256(b"\0".join([path.encode(), key.encode(), body])).digest()
            reply = await session.calls.serve(
                digest,
                bool(key) or retries not in ("", "0"),
                lambda: answer(session, content),
                lambda: _gone(request),
            )
            if reply.events is not None:
                return Response(reply.events, media_type="text/event-stream")
            return JSONResponse(reply.content)

        return handler

    def _session(self, request: Request) -> Session:
        token, name = _token(request), request.path_params.get("id")
        if name is None:
            return self._sessions.session_of(token)
        if same(token, self.admin_key):
            return self._sessions.session(name)
        return self._sessions.session(name, token)

    async def _body(self, request: Request) -> bytes:
        most = self._sessions.policy.limits.body_bytes
        try:
            return await asyncio.wait_for(_read(request, most), _BODY_S)
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body did not come within {_BODY_S:.0f} s") from None


class _Server(uvicorn.Server):
    """A server that leaves the signals to the training process."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; InputError if the address is taken or not of this machine."""
    try:
        family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        fix = "choose a free port, or 0 for any, and an address of this machine"
        raise InputError(f"the endpoint cannot listen on {host}:{port}: {why}; {fix}") from error
    listener.setblocking(False)
    return listener


def _checked(handler: Handler) -> Handler:
    """A handler whose refusals are answers, and whose bugs leave the server running."""

    async def checked(request: Request) -> Response:
        try:
            return await handler(request)
        except Refusal as error:
            return JSONResponse(error.content(), error.status, error.headers())
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        except EngineLost as error:  # the run says once that its server restarts
            return JSONResponse(Refusal(503, str(error)).content(), 503)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            why = f"internal error: {type(error).__name__}: {quoted(str(error))}"
            return JSONResponse(Refusal(500, why).content(), 500)

    return checked


async def _not_found(request: Request, error: Exception) -> Response:
    paths = ", ".join(f"/v1/{path}" for path in _APIS)
    known = f"{quoted(request.url.path)} is not served; the APIs are {paths} (POST)"
    return JSONResponse(Refusal(404, known).content(), 404)


async def _read(request: Request, most: int) -> bytes:
    """The body of a request; Refusal if it has more than ``most`` bytes."""
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > most:
            raise Refusal(413, f"the body has more than {most} bytes", retry=False)
    return bytes(found)


async def _gone(request: Request) -> None:
    """Return when the client closes the connection; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _token(request: Request) -> str:
    """The API key that a request carries, as OpenAI's or Anthropic's clients send it."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else ""
    return given or request.headers.get("x-api-key", "")


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; Refusal if it is none."""
    try:
        content = parse_json(body)
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise invalid("the body is not a JSON object")
    return content


def record_json(record: EpisodeRecord) -> dict[str, Any]:
    leaves = [
        {
            "context_ids": leaf.context_ids.tolist(),
            "ids": leaf.ids.tolist(),
            "logprobs": leaf.logprobs.tolist(),
            "parts": leaf.parts,
            "finish_reason": leaf.finish_reason,
        }
        for leaf in record.leaves
    ]
    return {**vars(record), "leaves": leaves, "numbers": dict(record.numbers)}
