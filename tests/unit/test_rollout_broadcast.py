"""Servers that refuse, or never join, the process group that weights are broadcast in."""

from __future__ import annotations

import pytest
import torch
from hostile_server import hostile_server, request_of, says

from mppo.rollout.sglang.server_api import SGLangApi
from mppo.rollout.transport.broadcast import DistributedTransport

LONG_S = 3600.0
"""Longer than any test may take: a refusal must not wait for the limit."""


def _failure_of_joining(answer, timeout_s: float) -> Exception:
    with hostile_server(answer) as url:
        transport = DistributedTransport(torch.device("cpu"), "gloo", 1, "127.0.0.1", timeout_s)
        transport.open({0: SGLangApi(url, None, LONG_S)}, 1)
        try:
            with pytest.raises(Exception) as caught:  # the caller looks at it
                transport.close()
        finally:
            transport.stop()
    return caught.value


def test_a_refusal_to_join_is_raised_at_once():
    error = _failure_of_joining(says(b"no such backend", b"400 Bad"), LONG_S)
    assert "/init_weights_update_group: status 400: no such backend" in str(error)


def test_a_server_that_never_joins_is_waited_for_until_the_limit():
    def silent(connection, request) -> None:
        connection.settimeout(60)
        request_of(connection)  # there is none: until the client closes

    error = _failure_of_joining(silent, 1.0)
    assert "not every server joined" in str(error)
    assert "NCCL_SOCKET_IFNAME" in str(error)
