"""A web server as an origin: index pages list, plain GETs read.

Python's http.server, nginx, Apache and Caddy write index pages. The names are the links of a page that lead one step down;
sizes and times come from a HEAD per name, when they are needed. Keys are percent-decoded paths, without the first slash."""

from __future__ import annotations

from collections.abc import Mapping
from html.parser import HTMLParser
from urllib.parse import quote, unquote, urljoin, urlsplit

from cachefs.base.errors import ConfigError, NotFound, Unsupported
from cachefs.origin.http import (
    Exchange,
    HttpClient,
    Reply,
    Sign,
    Signed,
    Transport,
    refusal,
)
from cachefs.origin.protocol import Body, ListPage, ObjectInfo


class NoCredentials:
    advice = "the server wants credentials, and this kind of source has none"

    def renew(self, since: float) -> bool:
        return False


class Host:
    """A web server; `label` is its URL."""

    def __init__(self, label: str) -> None:
        self.label = self.source = label
        self.credentials = NoCredentials()

    def url(self) -> str:
        return self.label

    def sign(self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes) -> Signed:
        return url, headers

    def signer(self) -> Sign:
        return self.sign


class WebClient(HttpClient):
    """Reads the files of a host. An index page is read whole and cut into pages of names in order."""

    def _described(self, key: str, reply: Reply) -> ObjectInfo:
        if not key.endswith("/"):
            if urlsplit(reply.url).path.endswith("/"):  # the server has led from "dir" to "dir/"
                raise NotFound(f"{self.name(key)}: is a directory")
        elif reply.status == 403:  # nginx and Apache, for a directory without an index
            return ObjectInfo(key, 0, 0, "")
        return super()._described(key, reply)

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        url = f"{self.place.label}/{quote(prefix, errors='surrogateescape')}"
        reply = self.transport.send(Exchange("GET", url, {"Accept": "text/html"}))
        if reply.status == 403:  # nginx and Apache, for a directory without an index
            raise Unsupported(f"{url}: the server shows no index of it; names can be opened but not listed")
        if reply.status != 200:
            raise refusal(reply.status, name=url, headers=reply.headers)
        if "html" not in reply.headers.get("content-type", ""):
            raise Unsupported(f"{url}: no index page there; names can be opened but not listed")
        names = names_in(reply.body.decode("utf-8", "replace"), reply.url)
        if token:
            names = [name for name in names if prefix + name > token]
        page = names[:limit]
        objects = [ObjectInfo(prefix + name, -1, 0, "") for name in page if not name.endswith("/")]
        prefixes = [prefix + name for name in page if name.endswith("/")]
        return ListPage(objects, prefixes, prefix + page[-1] if len(names) > limit else None)


def names_in(page: str, url: str) -> list[str]:
    """The names one level below `url` that the page links to, in order; those of directories end in a slash."""
    links = _Links()
    links.feed(page)
    base = urlsplit(url)
    found = set()
    for link in links.found:
        try:
            target = urlsplit(urljoin(url, link))
        except ValueError:  # as http://[your-host]/, in a text that the server shows above or below its index
            continue
        below = target.path.removeprefix(base.path)
        if target.netloc != base.netloc or target.query or below == target.path:
            continue
        name = unquote(below, errors="surrogateescape")
        # A name, or a name and its slash. A percent-encoded slash cannot be part of a path.
        if name.strip("/") and "/" not in name[:-1] and below.count("/") == name.count("/"):
            found.add(name)
    return sorted(found)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def web_client(url: str, stall_s: float) -> tuple[WebClient, str]:
    """A client of the web server that `url` names, and the key prefix."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ConfigError(f"{url!r} names no host")
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{parts.hostname}: a URL with a query cannot be mounted; names are appended to its path"
        )
    if "@" in parts.netloc:
        raise ConfigError(
            f"{parts.hostname}: credentials do not belong in a URL; every user of this host could see them"
        )
    host = Host(f"{parts.scheme}://{parts.netloc}")
    prefix = unquote(parts.path.lstrip("/"), errors="surrogateescape")
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    return WebClient(host, Transport(stall_s, follow=True)), prefix
