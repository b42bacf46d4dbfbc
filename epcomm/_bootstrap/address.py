"""Where rank 0 can be met: resolving names within a deadline, listening, connecting."""

import contextlib
import errno
import ipaddress
import os
import select
import socket
import threading
import time
from typing import Any, NamedTuple

from epcomm._bootstrap.deadline import TICK_S, Deadline
from epcomm.errors import InvalidArgumentError, SystemCallError

BIND_PATIENCE_S = 5.0  # an earlier job may still be closing the port
CONNECT_PATIENCE_S = 5.0  # then the next address, or the same again
KEY_HINT = "run `export EPCOMM_AUTHKEY=$(openssl rand -hex 32)` once and give every rank the same value"


class Place(NamedTuple):
    """Host and port of rank 0, as the environment names them."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Address(NamedTuple):
    """One resolved address."""

    family: int
    sockaddr: Any

    @property
    def loopback(self) -> bool:
        """Whether only this host reaches it."""
        address = ipaddress.ip_address(self.sockaddr[0].split("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    def __str__(self) -> str:
        return str(Place(*self.sockaddr[:2]))


def resolve(place: Place, deadline: Deadline) -> list[Address]:
    """Addresses of a place. A name server may be slow, so names are asked in a thread.

    Raises
    ------
    OSError
        The name is not known (yet), or the deadline passed.
    """
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    with contextlib.suppress(socket.gaierror):
        return _lookup(place, flags)
    outcome: list[Any] = []

    def ask() -> None:
        try:
            outcome.append(_lookup(place, socket.AI_NUMERICSERV))
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, name="epcomm-resolve", daemon=True)
    thread.start()
    while thread.is_alive() and not deadline.passed():
        thread.join(deadline.tick())
    if not outcome:
        raise TimeoutError(f"the name {place.host} is not resolved yet")
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


def _lookup(place: Place, flags: int) -> list[Address]:
    rows = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=flags)
    return [Address(family, sockaddr) for family, _, _, _, sockaddr in rows]


def check_key(place: Place, addresses: list[Address], key: bytes | None) -> None:
    """Refuse to meet beyond this host without a key: anybody who reaches the port could join."""
    if key is None and not any(address.loopback for address in addresses):
        raise InvalidArgumentError(f"MASTER_ADDR={place.host}: not a loopback address, so a key is needed: {KEY_HINT}")


def listen(place: Place, key: bytes | None, deadline: Deadline) -> tuple[socket.socket, Address]:
    """Listen at a place, or on all interfaces (with a key) where its address is not this host's own.

    Raises
    ------
    InvalidArgumentError
        The place is not a loopback address and there is no key, or its name is unknown.
    SystemCallError
        Somebody else holds the port.
    """
    try:
        addresses = resolve(place, deadline)
    except OSError as error:
        raise InvalidArgumentError(f"MASTER_ADDR={place.host}: not resolved on rank 0: {error}") from None
    check_key(place, addresses, key)
    if key is None:
        addresses = [address for address in addresses if address.loopback]
    patience = deadline.sub(BIND_PATIENCE_S)
    while True:
        try:
            return _listen_at(addresses, key)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or patience.passed():
                raise SystemCallError(
                    error.errno,
                    f"rendezvous: rank 0 cannot listen on {place}: {os.strerror(error.errno or 0)}; "
                    "set EPCOMM_PORT to a free port on every rank, or see whether two processes have rank 0",
                ) from None
        time.sleep(patience.tick())


def _listen_at(addresses: list[Address], key: bytes | None) -> tuple[socket.socket, Address]:
    failure: OSError | None = None
    for address in addresses:
        try:
            return _listener(address), address
        except OSError as error:
            failure = error
            if error.errno == errno.EADDRNOTAVAIL and key is not None:  # behind a NAT or a service name
                wildcard = "::" if address.family == socket.AF_INET6 else "0.0.0.0"
                everywhere = Address(address.family, (wildcard, *address.sockaddr[1:]))
                with contextlib.suppress(OSError):
                    return _listener(everywhere), everywhere
    raise failure or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def _listener(address: Address) -> socket.socket:
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        # Connections of earlier groups keep this port for a while after their end; they must not block it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address.sockaddr)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def dial(address: Address, deadline: Deadline) -> socket.socket:
    """Connect to one address.

    Raises
    ------
    OSError
        Nobody listens there, or no answer came in time.
    """
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        error = sock.connect_ex(address.sockaddr)
        if error == errno.EINPROGRESS:
            patience = deadline.sub(CONNECT_PATIENCE_S)
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            while not poller.poll(max(1, int(min(TICK_S, patience.remaining()) * 1000))):
                if patience.passed():
                    raise TimeoutError(errno.ETIMEDOUT, "no answer")
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        # A port that is free and in the ephemeral range can be picked for our own end: TCP then meets itself.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        sock.close()
        raise
    return sock
