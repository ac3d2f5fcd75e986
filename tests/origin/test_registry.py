"""URLs: which store they name, and what is said about those that name none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachefs.base.errors import ConfigError, NotFound
from cachefs.base.metrics import Metrics
from cachefs.origin import open_origin
from tests.origin.servers import AZURITE_KEY

HERE = {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY}
LOCAL_AZURE = {
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=dev;AccountKey=a2V5;BlobEndpoint=http://h:1/dev;"
}


def opened(url: str, **options: Any) -> tuple[str, str]:
    origin = open_origin(url, metrics=Metrics(), **options)
    return origin.source, origin.prefix


@pytest.mark.parametrize(
    ("url", "options", "env", "source", "prefix"),
    [
        ("s3://b", {}, {}, "s3://b", ""),
        ("s3://b/", {}, {}, "s3://b", ""),
        ("s3://b/a/c", {}, {}, "s3://b", "a/c/"),
        ("s3://b/a/c/", {}, {}, "s3://b", "a/c/"),
        ("s3://b/a%20b//c", {}, {}, "s3://b", "a%20b//c/"),
        ("S3://b", {"endpoint_url": "http://h:9/"}, {}, "s3://b@http://h:9", ""),
        ("s3://b", {}, {"AWS_ENDPOINT_URL": "http://h:9"}, "s3://b@http://h:9", ""),
        ("s3://b", {"client": "fsspec"}, {"AWS_ENDPOINT_URL_S3": "http://h:9"}, "s3://b@http://h:9", ""),
        ("az://c/p", {}, HERE, "az://acc/c", "p/"),
        ("abfs://c@acc.dfs.core.windows.net/p/q", {}, {}, "az://acc/c", "p/q/"),
        ("abfss://c@acc.dfs.core.windows.net", {"client": "fsspec"}, {}, "az://acc/c", ""),
        ("az://c@acc", {}, {}, "az://acc/c", ""),
        ("az://c", {}, LOCAL_AZURE, "az://dev/c@http://h:1/dev", ""),
        (
            "abfs://c@acc.dfs.core.chinacloudapi.cn",
            {},
            {},
            "az://acc/c@https://acc.blob.core.chinacloudapi.cn",
            "",
        ),
        ("gs://b/p", {"anonymous": True}, {}, "gs://b", "p/"),
        ("http://h:80/a%20b/c", {}, {}, "http://h:80", "a b/c/"),
        ("memory://x/y", {}, {}, "memory://x/y", ""),
    ],
)
def test_urls(
    url: str,
    options: dict[str, Any],
    env: dict[str, str],
    source: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert opened(url, **options) == (source, prefix)


def test_directories(tmp_path: Path) -> None:
    for url in (str(tmp_path), tmp_path.as_uri(), f"file://localhost{tmp_path}"):
        assert opened(url) == (f"file://{tmp_path}", "")
    with pytest.raises(NotFound, match="no such directory"):
        opened(f"{tmp_path}/missing")


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("bucket/prefix", {}, "not a URL such as s3://bucket/prefix, nor an absolute path"),
        ("s3://", {}, "names no bucket"),
        ("s3:///x", {}, "names no bucket"),
        ("file://relative/x", {}, "three slashes"),
        ("nosuch://x", {}, "unknown scheme 'nosuch'"),
        ("memory://x", {"client": "curl"}, "use --client fsspec"),
        ("s3://b", {"endpoint_url": "host:9000"}, "must begin with http:// or https://"),
        ("s3://b", {"profile": "nobody"}, "no AWS profile 'nobody'"),
        ("az://c", {}, "which Azure account"),
        ("http://user:pw@h/", {}, "credentials do not belong in a URL"),
        ("http://h/?list", {}, "a URL with a query"),
        ("az://c", {"requester_pays": True}, "--requester-pays is for s3:// with curl"),
        ("s3://b", {"sse_kms_key": "k", "client": "fsspec"}, "--sse-kms-key is for s3:// with curl"),
        ("http:///x", {}, "names no host"),
    ],
)
def test_what_is_wrong_with_a_url_is_one_line(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        opened(url, **options)
    assert said in str(wrong.value) and "\n" not in str(wrong.value) and "pw" not in str(wrong.value)


@pytest.mark.parametrize(
    ("url", "unwanted"),
    [
        ("/", ["curl", "botocore", "azure", "fsspec", "google", "urllib3"]),
        ("http://h/", ["botocore", "azure", "fsspec", "google"]),
        ("s3://b", ["azure", "fsspec", "google", "aiobotocore", "boto3"]),
        ("az://c@acc", ["botocore", "fsspec", "google", "azure.storage"]),
    ],
)
def test_only_what_the_url_needs_is_imported(url: str, unwanted: list[str]) -> None:
    script = (
        "import sys; from cachefs.base.metrics import Metrics; from cachefs.origin import open_origin; "
        f"open_origin({url!r}, metrics=Metrics()); print(*[n for n in {unwanted!r} if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
