"""Addresses of this host, and free TCP ports on it."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_ATTEMPTS = 32


def free_port() -> int:
    """Return a TCP port that is free on this host now. The port lies below the range from which
    Linux takes ports for outgoing connections, if such ports exist: it is then likely to be still
    free when a server binds it seconds later."""
    end = int(_OUTGOING_PORTS.read_text().split()[0]) if _OUTGOING_PORTS.exists() else 0
    count = max(0, end - _FIRST_PORT)
    candidates = [_FIRST_PORT + secrets.randbelow(count) for _ in range(_ATTEMPTS if count else 0)]
    for port in (*candidates, 0):
        with socket.socket() as listener, suppress(OSError):  # in use: try the next
            listener.bind(("", port))
            return listener.getsockname()[1]
    raise OSError("no TCP port is free on this host")


def own_address() -> str:
    """Return an address at which other hosts reach this one; loopback if it has no other."""
    routable = [address for address in _named_addresses() if not address.startswith("127.")]
    if routable:
        return routable[0]
    return address_towards("10.255.255.255")


def resolves_to_loopback() -> bool:
    """Whether this host's name resolves to loopback addresses only, as Debian sets it up."""
    addresses = _named_addresses()
    return bool(addresses) and all(address.startswith("127.") for address in addresses)


def interface_towards(host: str) -> str:
    """Return the network interface by which this machine reaches ``host``."""
    address = address_towards(host)
    return next(
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.address == address for entry in entries)
    )


def _named_addresses() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except socket.gaierror:
        return []
    return [str(entry[4][0]) for entry in found]


def address_towards(host: str) -> str:
    """Return this machine's address as ``host`` sees it; loopback if no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a datagram socket: chooses a route, sends nothing
        except OSError:  # no route
            return LOOPBACK
        return probe.getsockname()[0]
