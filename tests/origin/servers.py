"""Real servers for the contract suite, each behind the same four verbs: start, put, remove, open an origin on it."""

from __future__ import annotations

import functools
import http.client
import http.server
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from bench.lab.client import LabStore
from cachefs.base.metrics import Metrics
from cachefs.origin import Origin, open_origin
from cachefs.origin.attempts import Backoff
from tests.conftest import free_ports

QUICK = Backoff(retries=5, first_s=0.01, longest_s=0.05)
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Published by Microsoft for every emulator; no secret."""
SERVERS = Path(__file__).parents[2] / ".venv" / "servers"
"""Where scripts/setup puts servers that are no part of cachefs's own environment."""


class Server:
    """A place for objects. `url` is what a user would mount."""

    url = ""
    options: dict[str, Any] = {}  # noqa: RUF012
    env: dict[str, str] = {}  # noqa: RUF012
    any_key = False  # whether keys may hold what paths may not (`..`, `//`, control characters)
    lists_sizes = True
    empty_is_missing = False  # whether a prefix without keys does not exist

    def put(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    def remove(self, key: str) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        pass

    def origin(self, client: str = "auto", url: str | None = None, **options: Any) -> Origin:
        given = {"backoff": QUICK, "stall_s": 5.0, "metrics": Metrics(), **self.options, **options}
        return open_origin(url or self.url, client=client, **given)


class Moto(Server):
    any_key = True

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        python = _installed("bin/python")
        command = [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = _start(command, self.port)
        self.env = aws_env()
        self.url = "s3://bucket"
        self.options = {"endpoint_url": f"http://127.0.0.1:{self.port}"}
        self._request("PUT", "/bucket")

    def put(self, key: str, data: bytes) -> None:
        self._request("PUT", f"/bucket/{quote(key)}", data)

    def remove(self, key: str) -> None:
        self._request("DELETE", f"/bucket/{quote(key)}")

    def stop(self) -> None:
        _end(self._process)

    def _request(self, method: str, path: str, body: bytes | None = None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        # moto accepts any signature, but refuses to overwrite without one.
        credential = "Credential=tester/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        connection.request(method, path, body, {"Authorization": f"AWS4-HMAC-SHA256 {credential}"})
        assert connection.getresponse().status < 300
        connection.close()


class Lab(Server):
    any_key = True

    def __init__(self, root: Path, scheme: str = "s3") -> None:
        self.store = LabStore(root).__enter__()
        self.store.bucket("bucket")
        self.env = aws_env()
        self.url = f"{scheme}://bucket"
        self.options = {"endpoint_url": self.store.endpoint}
        if scheme == "gs":
            self.options["anonymous"] = True

    def put(self, key: str, data: bytes) -> None:
        self.store.put("bucket", key, data)

    def remove(self, key: str) -> None:
        self.store.delete("bucket", key)

    def stop(self) -> None:
        self.store.__exit__(None, None, None)


class Azurite(Server):
    def __init__(self) -> None:
        from azure.storage.blob import ContainerClient

        command = [_installed("node/bin/node"), _installed("node_modules/azurite/dist/src/blob/main.js")]
        (port,) = free_ports(1)
        flags = "--disableTelemetry --skipApiVersionCheck --inMemoryPersistence --loose --blobHost 127.0.0.1"
        self._process = _start([*command, *flags.split(), "--blobPort", str(port)], port)
        endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
        connection = f"AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};BlobEndpoint={endpoint};"
        self.url = "az://bucket"
        self.env = {"AZURE_STORAGE_CONNECTION_STRING": connection}
        self.container = ContainerClient.from_connection_string(
            connection, "bucket", connection_data_block_size=1 << 16, max_single_put_size=8 << 20
        )
        self.container.create_container()

    def put(self, key: str, data: bytes) -> None:
        self.container.upload_blob(key, data, overwrite=True)

    def remove(self, key: str) -> None:
        self.container.delete_blob(key)

    def stop(self) -> None:
        self.container.close()
        _end(self._process)


class Directory(Server):
    empty_is_missing = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = root.as_uri()

    def put(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def remove(self, key: str) -> None:
        (self.root / key).unlink()


class Web(Directory):
    lists_sizes = False

    def __init__(self, root: Path, certificate: Path | None = None, key: Path | None = None) -> None:
        super().__init__(root)
        handler = functools.partial(_Quiet, directory=str(root))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        scheme = "http"
        if certificate is not None:
            scheme, context = "https", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


class Memory(Server):
    url = "memory://origin-contract"
    empty_is_missing = True

    def __init__(self) -> None:
        import fsspec

        self._filesystem = fsspec.filesystem("memory")

    def put(self, key: str, data: bytes) -> None:
        self._filesystem.pipe_file(f"/origin-contract/{key}", data)

    def remove(self, key: str) -> None:
        self._filesystem.rm_file(f"/origin-contract/{key}")


def aws_env() -> dict[str, str]:
    """Credentials, and nothing of this machine's."""
    return {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def _installed(name: str) -> str:
    path = SERVERS / name
    if not path.exists():
        pytest.fail(f"{path} is missing: run scripts/setup")
    return str(path)


def _start(command: list[str], port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        assert process.poll() is None, f"{command[0]} ended"
        time.sleep(0.05)
    _end(process)
    raise TimeoutError(f"{command[0]} does not answer")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
