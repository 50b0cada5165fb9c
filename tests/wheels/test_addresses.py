from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.wheels.addresses import (
    checked_addresses,
    host_allowed,
    refusal,
    require_host,
    require_literal,
)
from kernel_depot.wheels.fetch_problems import AddressRefused, HostNotAllowed, UpstreamUnreachable


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "140.82.112.3", "203.0.113.80", "198.18.0.7", "2606:50c0:8000::154", "64:ff9b::808:808"],
)
def test_public_addresses_are_let_through(address: str) -> None:
    assert refusal(ip_address(address), allow_private=False) is None


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("10.0.0.1", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("169.254.169.254", "link-local"),
        ("100.64.0.1", "shared address space"),
        ("192.0.0.8", "special-purpose"),
        ("::1", "loopback"),
        ("fe80::1", "link-local"),
        ("fc00::1", "private"),
        ("fd12:3456::1", "private"),
        ("fec0::1", "private"),
        ("64:ff9b:1::1", "special-purpose"),
        ("::ffff:127.0.0.1", "loopback, embedded in IPv6"),
        ("::ffff:10.0.0.1", "private, embedded in IPv6"),
        ("::10.0.0.1", "private, embedded in IPv6"),
        ("64:ff9b::169.254.169.254", "link-local, embedded in IPv6"),
        ("2002:7f00:1::", "loopback, embedded in IPv6"),
        ("2001:0:4136:e378:8000:63bf:f5ff:fffe", "private, embedded in IPv6"),
    ],
)
def test_inside_addresses_need_the_setting(address: str, reason: str) -> None:
    assert refusal(ip_address(address), allow_private=False) == reason
    assert refusal(ip_address(address), allow_private=True) is None


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "::",
        "ff02::1",
        "::ffff:0.0.0.0",
        "4000::1",
    ],
)
def test_some_addresses_are_never_reached(address: str) -> None:
    assert refusal(ip_address(address), allow_private=False)
    assert refusal(ip_address(address), allow_private=True)


@given(st.ip_addresses(v=4))
def test_mapping_into_ipv6_changes_no_verdict(address: object) -> None:
    inner = ip_address(str(address))
    plain = refusal(inner, allow_private=False)
    for form in (f"::ffff:{inner}", f"64:ff9b::{inner}"):
        assert bool(refusal(ip_address(form), allow_private=False)) == bool(plain)


@given(st.ip_addresses())
def test_whatever_python_calls_private_is_refused_but_documentation(address: object) -> None:
    found = ip_address(str(address))
    if found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified:
        assert refusal(found, allow_private=False)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("github.com", True),
        ("GitHub.com", True),
        ("github.com.", True),
        ("api.github.com", False),
        ("github.com.evil.example", False),
        ("evilgithub.com", False),
        ("a.files.example", True),
        ("a.b.files.example", True),
        ("files.example", False),
        (".files.example", False),
        ("evilfiles.example", False),
    ],
)
def test_hosts(host: str, allowed: bool) -> None:
    assert host_allowed(host, ["github.com", "*.files.example"]) is allowed


def test_a_refused_host_is_named_with_the_allowed_ones() -> None:
    with pytest.raises(HostNotAllowed) as caught:
        require_host("evil.example", ["b.example", "a.example"], where="https://evil.example/")
    assert caught.value.found == "evil.example"
    assert caught.value.expected == "a.example, b.example"


def test_resolution_gives_checked_addresses() -> None:
    assert checked_addresses("127.0.0.1", 80, allow_private=True, where="") == ("127.0.0.1",)
    with pytest.raises(AddressRefused):
        checked_addresses("localhost", 80, allow_private=False, where="")


@pytest.mark.parametrize("spelling", ["2130706433", "0x7f.1", "127.1", "0177.0.0.1"])
def test_odd_spellings_of_loopback_are_refused(spelling: str) -> None:
    with pytest.raises((AddressRefused, UpstreamUnreachable)):
        checked_addresses(spelling, 80, allow_private=False, where="")


def test_one_refused_address_refuses_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(*_args: object, **_kwargs: object) -> list[object]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("140.82.112.3", 80)), (*kind, ("10.0.0.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with pytest.raises(AddressRefused) as caught:
        checked_addresses("mixed.example", 80, allow_private=False, where="")
    assert caught.value.found == "10.0.0.1"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70 + ".invalid", "a..b", "", "\0"])
def test_names_that_do_not_resolve(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not host:
        monkeypatch.setattr(socket, "getaddrinfo", _unresolved)
    with pytest.raises(UpstreamUnreachable):
        checked_addresses(host, 80, allow_private=False, where="")


def _unresolved(*_args: object, **_kwargs: object) -> None:
    raise socket.gaierror(-2, "Name or service not known")


def test_literal_addresses_are_judged_without_resolving() -> None:
    require_literal("mirror.example", allow_private=False, where="")
    require_literal("140.82.112.3", allow_private=False, where="")
    for host in ("10.0.0.1", "fe80::1%eth0", "::ffff:127.0.0.1"):
        with pytest.raises(AddressRefused):
            require_literal(host, allow_private=False, where="")
