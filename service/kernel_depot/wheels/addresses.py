"""Which hosts and network addresses a download may go to (server-side request forgery is refused here)."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from kernel_depot.wheels.fetch_problems import AddressRefused, HostNotAllowed, UpstreamUnreachable

IPAddress = IPv4Address | IPv6Address

# Blocks that lead into a network of one's own, from the IANA special-purpose registries. Documentation and
# benchmarking blocks are not among them: no service lives there, but networks that intercept outgoing
# connections resolve public names to them.
_INSIDE = {
    "loopback": ("127.0.0.0/8", "::1/128"),
    "link-local": ("169.254.0.0/16", "fe80::/10"),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"),
    "shared address space": ("100.64.0.0/10",),
    "special-purpose": ("192.0.0.0/24", "2001::/23", "64:ff9b:1::/48"),
}
_NEVER = {
    "unspecified": ("0.0.0.0/8", "::/128"),
    "multicast": ("224.0.0.0/4", "ff00::/8"),
    "reserved": ("240.0.0.0/4",),
}
_GLOBAL_UNICAST = ip_network("2000::/3")
_NAT64 = ip_network("64:ff9b::/96")
_IPV4_COMPATIBLE = ip_network("::/96")


def refusal(address: IPAddress, *, allow_private: bool) -> str | None:
    """Say why a download may not connect to `address`, or return None.

    Loopback, private, link-local and other addresses inside one's own network are let through by
    `allow_private`; multicast, unspecified and reserved ones never are. An IPv4 address inside an IPv6 one
    (mapped, compatible, 6to4, Teredo, NAT64) is judged in place of the IPv6 address that carries it.
    """
    inner = _embedded_ipv4(address)
    if inner is not None:
        reason = refusal(inner, allow_private=allow_private)
        return f"{reason}, embedded in IPv6" if reason else None
    reason = _named(address, _NEVER)
    if reason is not None:
        return reason
    reason = _named(address, _INSIDE)
    if reason is None and isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return "reserved"
    return None if allow_private else reason


def _named(address: IPAddress, blocks: Mapping[str, tuple[str, ...]]) -> str | None:
    for name, networks in blocks.items():
        for text in networks:
            network = ip_network(text)
            if network.version == address.version and address in network:
                return name
    return None


def _embedded_ipv4(address: IPAddress) -> IPv4Address | None:
    if isinstance(address, IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    low = IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64:
        return low
    if address in _IPV4_COMPATIBLE and int(address) > 0xFFFF:
        return low
    return None


def host_allowed(host: str, allowed: Iterable[str]) -> bool:
    """Tell whether `host` is one of `allowed`; an entry `*.example.org` covers every host below it."""
    name = host.lower().rstrip(".")
    for entry in allowed:
        pattern = entry.lower().rstrip(".")
        if pattern.startswith("*."):
            if name.endswith(pattern[1:]) and len(name) > len(pattern) - 1:
                return True
        elif name == pattern:
            return True
    return False


def require_host(host: str, allowed: Iterable[str], *, where: str) -> None:
    """Raise HostNotAllowed when `host` is not one of `allowed`."""
    names = sorted(allowed)
    if not host_allowed(host, names):
        raise HostNotAllowed(
            f"downloads from {host} are not allowed",
            where=where,
            expected=", ".join(names) or "no host at all",
            found=host,
            remedy="add the host to the setting allowed_hosts if you trust it to serve wheels",
        )


def checked_addresses(host: str, port: int, *, allow_private: bool, where: str) -> tuple[str, ...]:
    """Resolve `host` and return its addresses in the resolver's order.

    Every address is judged, and one refused address refuses the host: a name that points at both a
    public and a private address is an attack or a mistake. Raise AddressRefused, or UpstreamUnreachable
    when the name does not resolve. The caller connects to what is returned and never resolves again.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UpstreamUnreachable(
            f"the host name {host} cannot be resolved: {error}",
            where=where,
            found=host,
            remedy="check the name, this machine's DNS, and whether a proxy is needed",
        ) from error
    addresses = list(dict.fromkeys(str(endpoint[0]) for *_, endpoint in found))
    for address in addresses:
        _require_address(address, host=host, allow_private=allow_private, where=where)
    return tuple(addresses)


def require_literal(host: str, *, allow_private: bool, where: str) -> None:
    """Raise AddressRefused when `host` is itself an address that downloads must not reach.

    For requests through a proxy, which resolves names where only it can see.
    """
    with suppress(ValueError):
        ip_address(host.partition("%")[0])
        _require_address(host, host=host, allow_private=allow_private, where=where)


def _require_address(address: str, *, host: str, allow_private: bool, where: str) -> None:
    reason = refusal(ip_address(address.partition("%")[0]), allow_private=allow_private)
    if reason is not None:
        raise AddressRefused(
            f"{host} resolves to {address}, which is {reason}",
            where=where,
            expected="a public address",
            found=address,
            remedy="set allow_private_addresses if this host is a mirror of your own",
        )
