"""Index pages of web servers as listings: the links of a page that lead one step down are its names.

Python's http.server, nginx, Apache and Caddy all write such pages. They tell names only; sizes and times are
asked for with a HEAD when somebody wants them. Keys are paths on the host, without the leading slash,
percent-decoded.
"""

from __future__ import annotations

from html.parser import HTMLParser
from urllib.parse import quote, unquote, urljoin, urlsplit

from cachefs.errors import Unsupported
from cachefs.origin.listing.http import Fetcher
from cachefs.origin.protocol import ListPage, ObjectInfo
from cachefs.origin.replies import refusal


class IndexLister:
    """Index pages of the host whose URL is `host`. A page is read whole and cut into pages by name."""

    def __init__(self, host: str, fetcher: Fetcher) -> None:
        self._host, self._fetcher = host, fetcher

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage:
        url = f"{self._host}/{quote(prefix, errors='surrogateescape')}"
        reply = self._fetcher.get(url, {"Accept": "text/html"})
        if reply.status == 403:  # how nginx and Apache answer for a directory they have no index of
            raise Unsupported(f"{url}: the server shows no index of it; names can be opened but not listed")
        if reply.status != 200:
            raise refusal(reply.status, what=url, retry_after=reply.headers.get("retry-after"))
        if "html" not in reply.headers.get("content-type", ""):
            raise Unsupported(f"{url}: no index page there; names can be opened but not listed")
        names = names_in(reply.body.decode("utf-8", "replace"), url)
        after = token if token is not None else start_after
        if after:
            names = [name for name in names if prefix + name > after]
        page = names[:limit]
        objects = [ObjectInfo(prefix + name, -1, 0, "") for name in page if not name.endswith("/")]
        prefixes = [prefix + name for name in page if name.endswith("/")]
        return ListPage(objects, prefixes, prefix + page[-1] if len(names) > limit else None)


def names_in(page: str, url: str) -> list[str]:
    """Names one level below `url` that the page links to, directories with their slash, in order."""
    links = _Links()
    links.feed(page)
    here = urlsplit(url)
    found = set()
    for link in links.found:
        there = urlsplit(urljoin(url, link))
        below = there.path.removeprefix(here.path)
        if there.netloc != here.netloc or there.query or below == there.path:
            continue
        name = unquote(below, errors="surrogateescape")
        # One step: a name, or a name and its slash. A slash that was percent-encoded cannot be part of a
        # path.
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
