"""Where an S3 bucket is, and both ways into it: signed LISTs, and an obstore for the bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cachefs.errors import PermissionDenied
from cachefs.origin import conditions
from cachefs.origin.credentials.aws import AwsCredentials
from cachefs.origin.listing.http import Fetcher, Reply
from cachefs.origin.listing.s3 import BucketLister
from cachefs.origin.obstore_client import ObstoreClient, client_options, retry_config
from cachefs.origin.s3_writing import AMAZON, BucketWriter
from cachefs.origin.signed import SignedReader
from cachefs.origin.writing import Body

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class Bucket:
    """Bucket, endpoint and region. Without an endpoint it is AWS, and the region may be learnt from AWS's
    replies."""

    def __init__(
        self, name: str, endpoint_url: str | None, region: str | None, credentials: AwsCredentials
    ) -> None:
        self.name = name
        self.credentials = credentials
        environ = os.environ.get
        self.endpoint_url = (
            endpoint_url
            or environ("AWS_ENDPOINT_URL_S3")
            or environ("AWS_ENDPOINT_URL")
            or credentials.setting("endpoint_url")
        )
        self.region = (
            region or environ("AWS_REGION") or environ("AWS_DEFAULT_REGION") or credentials.setting("region")
        ) or "us-east-1"
        # A dot in a bucket's name breaks the wildcard certificate of virtual hosts, so those use the path.
        self.virtual_host = not self.endpoint_url and "." not in name

    @property
    def source(self) -> str:
        """The store's identity."""
        return f"s3://{self.name}" + (f"@{self.endpoint_url.rstrip('/')}" if self.endpoint_url else "")

    def url(self) -> str:
        """The URL that a key is appended to after a slash."""
        if self.endpoint_url:
            return f"{self.endpoint_url.rstrip('/')}/{self.name}"
        domain = "amazonaws.com.cn" if self.region.startswith("cn-") else "amazonaws.com"
        if self.virtual_host:
            return f"https://{self.name}.s3.{self.region}.{domain}"
        return f"https://s3.{self.region}.{domain}/{self.name}"

    def moved(self, reply: Reply) -> bool:
        """Learn the region from a reply that names another one (301, 307 and 400 do, on AWS)."""
        region = reply.headers.get("x-amz-bucket-region")
        if not region or region == self.region or self.endpoint_url:
            return False
        self.region = region
        return True

    def sign(self, url: str, method: str = "GET") -> dict[str, str]:
        credentials = self.credentials.current()
        if credentials is None:
            return {}
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        request = AWSRequest(method, url)
        S3SigV4Auth(credentials, "s3", self.region).add_auth(request)
        return dict(request.headers.items())

    def sign_body(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes
    ) -> tuple[str, Mapping[str, str]]:
        """The same for a request with headers of its own and a body. Over TLS, which keeps bytes as they are, the body is
        not read for a digest; without it, the store compares."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        credentials = self.credentials.current()
        if credentials is None:
            return url, headers

        class Signer(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
            def payload(self, request: Any) -> str:
                if isinstance(body, bytes):
                    return hashlib.sha256(body).hexdigest()
                if url.startswith("https:"):
                    return "UNSIGNED-PAYLOAD"
                digest = hashlib.sha256()
                for piece in body.look():
                    digest.update(piece)
                return digest.hexdigest()

        request = AWSRequest(method, url, dict(headers))
        Signer(credentials, "s3", self.region).add_auth(request)
        return url, dict(request.headers.items())

    def open_store(self, stall_s: float) -> ObjectStore:
        from obstore.store import S3Store

        url = self.url()
        settings: dict[str, Any] = {"endpoint": url if self.virtual_host else url[: -len(self.name) - 1]}
        if "AWS_ENDPOINT_URL_S3" in os.environ:  # obstore would prefer it to what we pass
            settings["aws_endpoint_url_s3"] = settings["endpoint"]
        if self.credentials.anonymous:
            settings["skip_signature"] = True
        else:
            settings["credential_provider"] = self._provide
        return S3Store(
            self.name,
            region=self.region,
            virtual_hosted_style_request=self.virtual_host,
            client_options=client_options(stall_s),
            retry_config=retry_config(),
            **settings,
        )

    def _provide(self) -> dict[str, Any]:
        from datetime import UTC, datetime, timedelta

        found = self.credentials.current()
        if found is None:  # cannot be: an anonymous store has no provider
            raise PermissionDenied("no credentials")
        # botocore refreshes what is about to expire each time it is asked, so obstore shall ask now and then.
        # It asks again five minutes before the end of what it was told.
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=10),
        }


def s3_client(
    name: str,
    *,
    endpoint_url: str | None,
    region: str | None,
    profile: str | None,
    anonymous: bool,
    stall_s: float,
) -> tuple[ObstoreClient, str]:
    """The client, and its store's identity."""
    credentials = AwsCredentials(profile, anonymous)
    bucket = Bucket(name, endpoint_url, region, credentials)
    fetcher = Fetcher(stall_s)
    label = f"s3://{name}"
    lister = BucketLister(
        bucket.url,
        bucket.sign,
        fetcher,
        label=label,
        advice=lambda: credentials.advice,
        moved=bucket.moved,
    )
    signed = SignedReader(
        bucket.url,
        lambda method, url, headers: (url, {**headers, **bucket.sign(url, method)}),
        fetcher,
        label=label,
        advice=lambda: credentials.advice,
    )
    writer = BucketWriter(
        *(name, AMAZON, bucket.url, bucket.sign_body, fetcher),
        label=label,
        advice=lambda: credentials.advice,
        conditions=conditions.of_endpoint(bucket.endpoint_url),
    )
    client = ObstoreClient(
        lambda: bucket.open_store(stall_s),
        lister,
        signed=signed,
        writer=writer,
        label=label,
        credentials=credentials,
        close=fetcher.close,
    )
    return client, bucket.source
