"""Where an Azure container is, and both ways into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from cachefs.errors import ConfigError
from cachefs.origin.azure_writing import ContainerWriter
from cachefs.origin.credentials.azure import AzureCredentials, settings
from cachefs.origin.listing.azure import ContainerLister
from cachefs.origin.listing.http import Fetcher
from cachefs.origin.obstore_client import ObstoreClient, client_options, retry_config
from cachefs.origin.signed import SignedReader


@dataclass(frozen=True, slots=True)
class Container:
    """A container, its account, and the URL of that account."""

    container: str
    account: str
    endpoint: str

    @property
    def label(self) -> str:
        return f"az://{self.account}/{self.container}"

    @property
    def source(self) -> str:
        """The store's identity."""
        usual = self.endpoint == f"https://{self.account}.blob.core.windows.net"
        return self.label if usual else f"{self.label}@{self.endpoint}"


def account_and_endpoint(authority: str, endpoint_url: str | None) -> Container:
    """The place named by `container` or `container@account[.dfs.core.windows.net]`.

    The endpoint's URL is that of the account: an emulator's ends in the account's name."""
    said = settings()
    container, _, host = authority.partition("@")
    account = host.partition(".")[0] or said.get("AccountName", "")
    if not account:
        raise ConfigError(
            f"which Azure account has the container {container!r}? Write "
            f"abfs://{container}@ACCOUNT.dfs.core.windows.net, or set AZURE_STORAGE_ACCOUNT_NAME or "
            "AZURE_STORAGE_CONNECTION_STRING"
        )
    suffix = said.get("EndpointSuffix", "core.windows.net")
    if "." in host:
        suffix = host.partition(".")[2].removeprefix("dfs.").removeprefix("blob.")
    own = said.get("BlobEndpoint") if said.get("AccountName", account) == account else None
    endpoint = endpoint_url or own or f"https://{account}.blob.{suffix}"
    return Container(container, account, endpoint.rstrip("/"))


def azure_client(
    authority: str, *, endpoint_url: str | None, anonymous: bool, stall_s: float
) -> tuple[ObstoreClient, str]:
    """The client, and its store's identity."""
    place = account_and_endpoint(authority, endpoint_url)
    credentials = AzureCredentials(place.account, anonymous)
    fetcher = Fetcher(stall_s)
    url = f"{place.endpoint}/{place.container}"
    lister = ContainerLister(
        url,
        lambda url: credentials.sign("GET", url, {}),
        fetcher,
        label=place.label,
        advice=lambda: credentials.advice,
    )
    signed = SignedReader(
        lambda: url, credentials.sign, fetcher, label=place.label, advice=lambda: credentials.advice
    )

    def source_url(key: str) -> str:
        """Azure reads it as whoever asks it to, except that a SAS is part of a URL."""
        sas = credentials.current().sas
        return f"{url}/{quote(key)}" + (f"?{sas}" if sas else "")

    writer = ContainerWriter(
        lambda: url,
        lambda method, url, headers, body: credentials.sign(method, url, headers),
        fetcher,
        label=place.label,
        advice=lambda: credentials.advice,
        source_url=source_url,
    )

    def provide() -> dict[str, Any]:
        proof = credentials.current()
        if proof.key:
            return {"access_key": proof.key, "expires_at": None}
        if proof.sas:
            return {"sas_token": proof.sas, "expires_at": None}
        return {"token": proof.token, "expires_at": proof.expires_at}

    def open_store() -> Any:
        from obstore.store import AzureStore

        access: dict[str, Any] = {"skip_signature": True} if anonymous else {"credential_provider": provide}
        return AzureStore(
            place.container,
            account_name=place.account,
            endpoint=place.endpoint,
            client_options=client_options(stall_s),
            retry_config=retry_config(),
            **access,
        )

    client = ObstoreClient(
        open_store,
        lister,
        signed=signed,
        writer=writer,
        label=place.label,
        credentials=credentials,
        close=fetcher.close,
    )
    return client, place.source
