"""Which requests are accepted: signatures, times, replays; and addresses where a node must not listen without them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.errors import ConfigError
from cachefs.peers import auth
from cachefs.peers.auth import Key, Signer, Unauthorized, Verifier, check_listen, check_server, read_key

KEY = Key(b"k" * 16)
ASKED = ("/v1/handshake", "node-1:7000")


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def pair(key: Key = KEY) -> tuple[Signer, Verifier, Clock]:
    clock = Clock()
    return Signer(key, clock=clock), Verifier(KEY, clock=clock), clock


def test_a_signed_request_is_taken_once() -> None:
    signer, verifier, _ = pair()
    authorization, macs = signer.sign(*ASKED)
    assert verifier.verify(*ASKED, authorization) == macs
    with pytest.raises(Unauthorized, match="replay"):
        verifier.verify(*ASKED, authorization)


@pytest.mark.parametrize("asked", [("/v1/have", ASKED[1]), (ASKED[0], "node-2:7000")])
def test_a_signature_is_for_one_request_to_one_node(asked: tuple[str, str]) -> None:
    signer, verifier, _ = pair()
    with pytest.raises(Unauthorized, match="another"):
        verifier.verify(*asked, signer.sign(*ASKED)[0])


def test_another_key_does_not_open() -> None:
    signer, verifier, _ = pair(Key(b"l" * 16))
    with pytest.raises(Unauthorized, match="another key"):
        verifier.verify(*ASKED, signer.sign(*ASKED)[0])


@pytest.mark.parametrize(("late_s", "good"), [(29, True), (31, False), (-29, True), (-31, False)])
def test_a_request_is_good_for_half_a_minute(late_s: float, good: bool) -> None:
    signer, verifier, clock = pair()
    authorization, _ = signer.sign(*ASKED)
    clock.now += late_s
    if good:
        verifier.verify(*ASKED, authorization)
    else:
        with pytest.raises(Unauthorized, match="clocks"):
            verifier.verify(*ASKED, authorization)


@given(st.text(max_size=200))
def test_any_header_is_a_signature_or_refused(header: str) -> None:
    _, verifier, _ = pair()
    with pytest.raises(Unauthorized):
        verifier.verify(*ASKED, header)
    with pytest.raises(Unauthorized):
        verifier.verify(*ASKED, f"{auth.SCHEME} {header}")


@given(st.integers(1, 300), st.integers(0, 500), st.randoms(use_true_random=False))
def test_requests_may_overtake_each_other_and_still_count_once(
    count: int, reach: int, rng: random.Random
) -> None:
    signer, verifier, _ = pair()
    signed = [signer.sign(*ASKED)[0] for _ in range(count)]
    order = sorted(range(count), key=lambda i: i + rng.uniform(0, reach))
    for i in order:
        verifier.verify(*ASKED, signed[i])
    for i in rng.sample(range(count), min(count, 50)):
        with pytest.raises(Unauthorized):
            verifier.verify(*ASKED, signed[i])


def test_one_that_is_too_far_behind_is_refused_unseen() -> None:
    signer, verifier, _ = pair()
    signed = [signer.sign(*ASKED)[0] for _ in range(auth.REORDERED_AT_MOST + 1)]
    verifier.verify(*ASKED, signed[-1])
    verifier.verify(*ASKED, signed[1])
    with pytest.raises(Unauthorized):
        verifier.verify(*ASKED, signed[0])


def test_what_is_asked_of_other_nodes_does_not_make_a_request_too_late() -> None:
    signer, verifier, _ = pair()
    late = signer.sign(*ASKED)[0]
    for _ in range(2 * auth.REORDERED_AT_MOST):
        signer.sign(ASKED[0], "node-2:7000")
    verifier.verify(*ASKED, signer.sign(*ASKED)[0])
    verifier.verify(*ASKED, late)
    signer.forget(ASKED[1])
    verifier.verify(*ASKED, signer.sign(*ASKED)[0])


def test_senders_are_forgotten_once_their_requests_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_SESSIONS", 3)
    clock = Clock()
    verifier = Verifier(KEY, clock=clock)
    first = [Signer(KEY, clock=clock).sign(*ASKED)[0] for _ in range(3)]
    for header in first:
        verifier.verify(*ASKED, header)
    with pytest.raises(Unauthorized, match="too many"):
        verifier.verify(*ASKED, Signer(KEY, clock=clock).sign(*ASKED)[0])
    clock.now += auth.WINDOW_S + 1
    verifier.verify(*ASKED, Signer(KEY, clock=clock).sign(*ASKED)[0])
    for header in first:
        with pytest.raises(Unauthorized):
            verifier.verify(*ASKED, header)


def test_macs_say_what_they_protect() -> None:
    one, other = auth.Macs(KEY, b"n"), auth.Macs(KEY, b"m")
    macs = {
        one.reply(200, 3, b"abc"),
        other.reply(200, 3, b"abc"),
        one.reply(404, 3, b"abc"),
        one.reply(200, 4, b"abc"),
        one.reply(200, 3, b"abd"),
        one.block(1, b"12345678").hex(),
        one.block(2, b"12345678").hex(),
        one.block(1, b"12345679").hex(),
        other.block(1, b"12345678").hex(),
    }
    assert len(macs) == 9
    assert KEY.mac(b"a", b"bc") != KEY.mac(b"ab", b"c")


def test_a_key_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot read"):
        read_key(path)
    path.write_bytes(b"  short\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="16 to 4096"):
        read_key(path)
    path.write_bytes(b"x" * 4097)
    with pytest.raises(ConfigError, match="16 to 4096"):
        read_key(path)
    path.write_bytes(b"sixteen bytes it\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="every user can read"):
        read_key(path)
    path.chmod(0o640)
    assert read_key(path).mac(b"l") == Key(b"sixteen bytes it").mac(b"l")
    assert "sixteen" not in repr(read_key(path))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_on_loopback_no_key_is_needed(host: str) -> None:
    check_listen(host, None, None)
    check_server(host, None, None)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]", "10.0.0.1", "node-1", "localhost.example.org"])
def test_elsewhere_strangers_must_be_kept_out(host: str) -> None:
    for check in (check_listen, check_server):
        with pytest.raises(ConfigError) as caught:
            check(host, None, None)
        assert "\n" not in str(caught.value)
        check(host, KEY, None)
