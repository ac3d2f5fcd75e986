"""Ceph's RADOS Gateway, a real S3 for the contract suites: one monitor, one object store in memory, one gateway.

`scripts/setup test` unpacks Debian's packages below `.venv/ceph`; nothing is installed. Everything else lies in a short
directory of its own (a socket's path has 107 bytes at most), listens on loopback, and ends with `stop`, or with the process
that started it.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.conftest import ON_CI, free_ports
from tests.origin.servers import Server, aws_env

UNPACKED = Path(sys.prefix) / "ceph/root"
LIBRARIES = UNPACKED / "usr/lib" / f"{os.uname().machine}-linux-gnu"
DEADLINE_S = 120.0
"""For each step of the start, of which there are ten. They take 6 s in all on an idle machine."""

CONFIGURATION = """
[global]
fsid = {cluster}
mon_host = [v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_old}]
mon_initial_members = a
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_port_min = {first}
ms_bind_port_max = {last}
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
osd_crush_chooseleaf_type = 0
paxos_propose_interval = 0.1
paxos_min_wait = 0.01
mon_cluster_log_to_file = false
mon_data_avail_crit = 1
run_dir = {base}
admin_socket = {base}/$name.asok
log_file = {base}/$name.log
erasure_code_dir = {libraries}/ceph/erasure-code
plugin_dir = {libraries}/ceph
osd_class_dir = {libraries}/rados-classes
keyring = {base}/keyring
mon_data = {base}/mon
osd_data = {base}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
[client.rgw]
ms_mon_client_mode = crc
rgw_data = {base}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{port}
"""


def missing() -> str:
    """Why there is no gateway to test against, or ""."""
    if (UNPACKED / "usr/bin/radosgw").exists():
        return ""
    return "Ceph is not unpacked below .venv/ceph; on Debian, scripts/setup test does it"


def on_debian() -> bool:
    release = Path("/etc/os-release")
    return release.exists() and "ID=debian" in release.read_text().splitlines()


class Rgw(Server):
    """The server of the contract suites. Starting it costs 6 s, so one is shared by the tests of a process."""

    def __init__(self) -> None:
        if reason := missing():
            if ON_CI and on_debian():
                pytest.fail(reason)
            pytest.skip(reason)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._base = Path(tempfile.mkdtemp(prefix="rgw-"))
        self.port, mon, mon_old, first = free_ports(4)
        self._environment = {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(
                map(str, (LIBRARIES, LIBRARIES / "ceph", UNPACKED / "lib" / LIBRARIES.name))
            ),
            "PYTHONPATH": str(UNPACKED / "usr/lib/python3/dist-packages"),
            "CEPH_CONF": str(self._base / "ceph.conf"),
        }
        self.env = aws_env()
        self.url = "s3://bucket"
        self.options = {"endpoint_url": f"http://127.0.0.1:{self.port}", "stall_s": 30.0}
        try:
            self._start(mon, mon_old, first)
            self._request("PUT", "/bucket")
        except BaseException:
            self.stop()
            raise

    def put(self, key: str, data: bytes) -> None:
        self._request("PUT", f"/bucket/{quote(key)}", data)

    def remove(self, key: str) -> None:
        self._request("DELETE", f"/bucket/{quote(key)}")

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGKILL)  # all they hold is in memory
            process.wait()
        shutil.rmtree(self._base)

    def _start(self, mon: int, mon_old: int, first: int) -> None:
        base, cluster, osd = self._base, str(uuid.uuid4()), str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            (base / name).mkdir()
        (base / "ceph.conf").write_text(
            CONFIGURATION.format(
                **{"cluster": cluster, "base": base, "libraries": LIBRARIES, "port": self.port},
                **{"mon": mon, "mon_old": mon_old, "first": first, "last": first + 200},
            )
        )
        addresses = f"[v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_old}]"
        authority = ["--gen-key", "-n", "mon.", "--cap", "mon", "allow *"]
        self._run("ceph-authtool", "-C", str(base / "keyring"), *authority)
        monitors = ["--create", "--clobber", "--fsid", cluster, "--addv", "a", addresses]
        self._run("monmaptool", *monitors, str(base / "monmap"))
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", str(base / "monmap"))
        self._begin("ceph-mon", "-i", "a")
        self._run("ceph", "osd", "new", osd)  # waits for the monitor
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._begin("ceph-osd", "-i", "0")
        gateway = self._begin("radosgw", "-n", "client.rgw")
        self._until(self._answers, gateway)
        keys = ["--access-key=tester", "--secret-key=secret"]
        self._run("radosgw-admin", "-n", "client.rgw", "user", "create", "--uid=t", "--display-name=t", *keys)

    def _command(self, program: str, *arguments: str) -> list[str]:
        path = str(UNPACKED / "usr/bin" / program)
        # Debian's own Python: the bindings that `ceph` loads are for it.
        return [*(["/usr/bin/python3"] if program == "ceph" else []), path, *arguments]

    def _run(self, program: str, *arguments: str) -> None:
        command = self._command(program, *arguments)
        done = subprocess.run(
            command, env=self._environment, capture_output=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, f"{program}: {done.stderr.decode(errors='replace')[-2000:]}"

    def _begin(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        dies_with_us = ["setpriv", "--pdeathsig", "KILL"]
        process = subprocess.Popen(
            [*dies_with_us, *self._command(program, *arguments), "--foreground"],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._processes.append(process)
        return process

    def _until(self, true: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not true():
            assert process.poll() is None, f"{process.args!r} ended"
            assert time.monotonic() < end, f"{process.args!r} does not answer"
            time.sleep(0.05)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: bytes = b"") -> None:
        status, _ = self.ask(method, path, body)
        assert status < 300, f"{method} {path}: {status}"

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the reply to a request as written, signed."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        url = f"{self.options['endpoint_url']}{path}"
        request = AWSRequest(method, url, dict(headers or {}), data=body)
        S3SigV4Auth(Credentials("tester", "secret"), "s3", "us-east-1").add_auth(request)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, dict(request.headers.items()))
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()
