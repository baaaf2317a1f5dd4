"""The fork server that runs the attacks of a test module."""

from __future__ import annotations

import pytest
from attacks.server import attack_server


@pytest.fixture(scope="module")
def server(request):
    """A fork server as nobody if the module sets ``AS_NOBODY``, else as this process's user."""
    with attack_server(request.module.AS_NOBODY) as server:
        yield server
