"""fetch: get a file from a public address, and from no other, whatever names, redirects and resolvers say."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from urllib.parse import urljoin, urlsplit

MAX_REDIRECTS = 3
SECONDS = 10.0  # for everything
PORTS = {"http": 80, "https": 443}


class FetchError(ValueError):
    """The file cannot be had; one line that says why and tells nothing about the inside of the network."""


def fetch(url: str, max_bytes: int) -> bytes:
    """The body of a GET, at most `max_bytes` + 1 of it.

    A name is resolved once for each request, all of its addresses must be public, and the connection goes to the
    address that was checked: a name that resolves to another one afterwards changes nothing. Redirects are followed
    here, each one checked alike. Proxies of the environment are not used. Raises FetchError.
    """
    deadline = time.monotonic() + SECONDS
    for _ in range(MAX_REDIRECTS + 1):
        body, location = _get(url, max_bytes, deadline)
        if location is None:
            return body
        url = urljoin(url, location)
    raise FetchError(f"more than {MAX_REDIRECTS} redirects")


def public_address(host: str, port: int) -> tuple[str, int]:
    """(address, family) to connect to. Raises FetchError unless every address of the host is public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise FetchError("the address cannot be fetched") from None
    for entry in found:
        if not is_public(str(entry[4][0])):
            raise FetchError("the address cannot be fetched")  # nor may the client learn that something is there
    family, _, _, _, address = found[0]
    return str(address[0]), family


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet; addresses that wrap another one count as that one."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _get(url: str, max_bytes: int, deadline: float) -> tuple[bytes, str | None]:
    """(body, None), or (nothing, where to go instead)."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        raise FetchError("not a URL") from None
    if parts.scheme not in PORTS or not host or parts.username is not None:
        raise FetchError("expected http(s)://HOST/PATH")
    if port != PORTS[parts.scheme]:
        raise FetchError(f"only port {PORTS[parts.scheme]} is fetched from")
    address, family = public_address(host, port)
    connection = _Pinned(host, address, family, parts.scheme == "https")
    try:
        connection.timeout = _left(deadline)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"accept": "image/*", "user-agent": "openk3"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            return b"", response.getheader("location", "")
        if response.status != 200:
            raise FetchError(f"the address answered {response.status}")
        return _read(response, connection, max_bytes, deadline), None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, FetchError):
            raise
        raise FetchError("the address cannot be fetched") from None
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, connection: _Pinned, max_bytes: int, deadline: float) -> bytes:
    """A body that may neither be endless nor trickle for ever."""
    body = b""
    while len(body) <= max_bytes:
        if connection.sock is not None:
            connection.sock.settimeout(_left(deadline))
        piece = response.read1(65536)
        if not piece:
            break
        body += piece
    return body[: max_bytes + 1]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise FetchError(f"not fetched within {SECONDS:g} s")
    return left


class _Pinned(http.client.HTTPConnection):
    """Connects to an address that was checked, and speaks to it under its name."""

    def __init__(self, host: str, address: str, family: int, is_tls: bool) -> None:
        super().__init__(host, PORTS["https" if is_tls else "http"])
        self._address, self._family, self._is_tls = address, family, is_tls

    def connect(self) -> None:
        """Without asking a resolver again."""
        self.sock = socket.socket(self._family, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect((self._address, self.port))
        if self._is_tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
