"""How many files of this package one request between two nodes passes on each side (docs/architecture.md)."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import cachefs
from cachefs.peers.auth import Signer, Verifier
from cachefs.peers.client import Client
from cachefs.peers.cluster import Cluster
from cachefs.peers.health import PeerTable
from cachefs.peers.membership import Membership, Sighting
from tests.peers.exchange import HANDSHAKE, KEY, KIB, MIB, Kept, PlanStore, content, in_trio, serving
from tests.peers.nodes import Told

PACKAGE = str(Path(cachefs.__file__).parent) + "/"

BOTH = {"peers/wire.py", "base/http1.py", "peers/auth.py", "peers/health.py", "base/names.py"}
CLIENT = BOTH | {"peers/cluster.py", "peers/client.py"}
SERVER = BOTH | {"peers/server.py", "base/tasks.py"}


@pytest.mark.parametrize("size", [100 * KIB, 3 * MIB])
@in_trio
async def test_a_request_between_two_nodes_passes_seven_files_at_most_on_each_side(size: int) -> None:
    plan_store, data = PlanStore(), content(size)
    version = plan_store.put(data)
    passed = set[str]()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            passed.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    client = Client(signer=Signer(KEY))
    me = replace(HANDSHAKE, node="me", weight=0.0)
    membership = Membership(Told(), me)
    cluster = Cluster(membership, client, PeerTable(), random.Random(1), block_size=MIB, serves=False)
    async with serving(plan_store, verifier=Verifier(KEY)) as (address, _):
        membership._report([Sighting(address, HANDSHAKE)])
        (asked,) = cluster.candidates(version.digest, 0)
        before = sys.getprofile()
        for watched in (False, True):  # the second request on a connection that is kept
            sink = Kept()
            if watched:
                threading.setprofile_all_threads(profile) if sys.version_info >= (
                    3,
                    12,
                ) else threading.setprofile(profile)
                sys.setprofile(profile)
            try:
                await cluster.read(asked, version, 0, size, sink, sink_waits=True)
            finally:
                sys.setprofile(before)
                threading.setprofile(None)  # type: ignore[arg-type]
            assert sink.data == data
        client.close()
    assert passed <= CLIENT | SERVER, "a file was added to the journey"
    assert {"peers/client.py", "peers/server.py", "base/http1.py"} <= passed
    assert len(CLIENT) <= 7 and len(SERVER) <= 7
