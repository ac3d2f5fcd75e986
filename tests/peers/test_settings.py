"""What the options say about peers, before anything is mounted."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from cachefs.base.errors import ConfigError
from cachefs.config.config import ROWS, Config, Source
from cachefs.peers.settings import NEED_PEERS, settings
from cachefs.peers.wire import MAX_HANDSHAKE_TEXT

ALONE = Config(sources=(Source("", "file:///x"),), mountpoint=Path("/mnt"))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("replicas", 2, "--replicas"),
        ("group_weight", 0.5, "--group-weight"),
        ("sharing", False, "--no-sharing"),
        ("cache_group", "a", "--cache-group"),
        ("peer_listen", "127.0.0.1:1", "--peer-listen"),
        ("peer_key_file", Path("/k"), "--peer-key-file"),
        ("peer_cert", Path("/c"), "--peer-cert"),
        ("peer_cert_key", Path("/c"), "--peer-cert-key"),
        ("peer_ca", Path("/c"), "--peer-ca"),
        ("etcd_ca", Path("/c"), "--etcd-ca"),
    ],
)
def test_what_does_nothing_without_peers_is_refused(option: str, value: Any, said: str) -> None:
    assert option in NEED_PEERS
    with pytest.raises(ConfigError) as caught:
        settings(replace(ALONE, **{option: value}))
    assert str(caught.value).startswith(f"{said} needs --peers")


def test_without_any_of_them_there_are_no_peers() -> None:
    assert settings(ALONE) is None


def test_a_group_that_no_node_would_accept_is_refused() -> None:
    node = replace(ALONE, peers="static:127.0.0.1:7070", cache_group="ä" * MAX_HANDSHAKE_TEXT)
    assert settings(node) is not None
    with pytest.raises(ConfigError, match="--cache-group: the name is too long: at most 256 characters"):
        settings(replace(node, cache_group=node.cache_group + "x"))


@pytest.mark.parametrize("text", ["1e9", "1000000", "0", "-1", "nan"])
def test_a_weight_that_is_none_is_told_what_one_is(text: str) -> None:
    with pytest.raises(ValueError, match="above 0 and below a million"):
        ROWS["group_weight"].parse(text)


def certificates(
    place: Path, authority: trustme.CA, certified: trustme.CA, *, expired: bool = False
) -> Config:
    """A node's files: its certificate is of one authority, and it believes another, or the same."""
    until = datetime.now(UTC) - timedelta(days=1) if expired else None
    own = authority.issue_cert("node.cluster", not_after=until)
    own.cert_chain_pems[0].write_to_path(place / "cert")
    own.private_key_pem.write_to_path(place / "key")
    certified.cert_pem.write_to_path(place / "ca")
    return replace(
        ALONE,
        peers="static:127.0.0.1:7070",
        peer_listen="127.0.0.1:7070",
        peer_cert=place / "cert",
        peer_cert_key=place / "key",
        peer_ca=place / "ca",
    )


def test_a_certificate_that_nobody_will_take_is_told_of(tmp_path: Path) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    good = settings(certificates(tmp_path, ours, ours))
    assert good is not None and good.warning == ""
    old = settings(certificates(tmp_path, ours, ours, expired=True))
    assert old is not None and "expired" in old.warning and str(tmp_path / "cert") in old.warning
    strange = settings(certificates(tmp_path, ours, theirs))
    assert strange is not None and strange.warning


@pytest.mark.parametrize("wrong", ["cert", "key", "ca"])
@pytest.mark.parametrize("how", ["missing", "empty", "rubbish"])
def test_the_file_that_is_wrong_is_the_one_that_is_named(tmp_path: Path, wrong: str, how: str) -> None:
    ours = trustme.CA()
    config = certificates(tmp_path, ours, ours)
    file = tmp_path / wrong
    file.unlink() if how == "missing" else file.write_text("" if how == "empty" else "rubbish\n")
    with pytest.raises(ConfigError) as caught:
        settings(config)
    said = str(caught.value)
    assert f"{file}:" in said and "\n" not in said
    assert not any(str(tmp_path / other) in said for other in {"cert", "key", "ca"} - {wrong})


def test_a_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    ours = trustme.CA()
    config = certificates(tmp_path, ours, ours)
    ours.issue_cert("another.cluster").private_key_pem.write_to_path(tmp_path / "key")
    with pytest.raises(ConfigError, match="key values mismatch") as caught:
        settings(config)
    assert str(tmp_path / "key") in str(caught.value)
