"""The kinds of requests and their handlers."""

from __future__ import annotations

from collections.abc import Callable

from bench.lab import markup, reading, writing
from bench.lab.exchange import Exchange, Hangup, Lab, S3Error
from bench.lab.markup import leaf
from bench.lab.wire import BadRequest, Connection, Request

HANDLERS: dict[str, Callable[[Exchange], None]] = {
    "get": reading.get_object,
    "head": reading.get_object,
    "list": reading.list_objects,
    "list_buckets": reading.list_buckets,
    "head_bucket": reading.head_bucket,
    "bucket_location": reading.bucket_location,
    "put": writing.put_object,
    "copy": writing.copy_object,
    "delete": writing.delete_object,
    "delete_many": writing.delete_objects,
    "create_bucket": writing.create_bucket,
    "create_upload": writing.create_upload,
    "upload_part": writing.upload_part,
    "copy_part": writing.copy_part,
    "complete_upload": writing.complete_upload,
    "abort_upload": writing.abort_upload,
    "list_parts": writing.list_parts,
    "list_uploads": writing.list_uploads,
}
"""Kind → handler. Counters, the log and fault rules have these names; all other requests are "other"."""

# Sub-resources that turn a request into something else entirely.
_FOREIGN = {
    "acl",
    "attributes",
    "cors",
    "encryption",
    "lifecycle",
    "policy",
    "tagging",
    "versioning",
    "versions",
}


def kind_of(request: Request) -> str:
    """A key of `HANDLERS`, or "other"."""
    method, query = request.method, request.query
    if not _FOREIGN.isdisjoint(query):
        return "other"
    if request.key:
        copies = "x-amz-copy-source" in request.headers
        if "uploadId" in query:
            part = "copy_part" if copies else "upload_part"
            kinds = {
                "GET": "list_parts",
                "PUT": part if "partNumber" in query else "other",
                "POST": "complete_upload",
                "DELETE": "abort_upload",
            }
        else:
            kinds = {
                "GET": "get",
                "HEAD": "head",
                "PUT": "copy" if copies else "put",
                "POST": "create_upload" if "uploads" in query else "other",
                "DELETE": "delete",
            }
    elif request.bucket:
        kinds = {
            "GET": "bucket_location"
            if "location" in query
            else "list_uploads"
            if "uploads" in query
            else "list",
            "HEAD": "head_bucket",
            "PUT": "create_bucket",
            "POST": "delete_many" if "delete" in query else "other",
        }
    else:
        kinds = {"GET": "list_buckets"}
    return kinds.get(method, "other")


def answer(lab: Lab, conn: Connection, request: Request) -> None:
    """Serve one S3 request; all errors end here."""
    exchange = Exchange(lab, conn, request, kind_of(request))
    try:
        try:
            exchange.admit()
            if exchange.kind == "other":
                raise S3Error("NotImplemented", "The lab does not know this operation")  # noqa: TRY301
            HANDLERS[exchange.kind](exchange)
        except S3Error as error:
            _refuse(exchange, error)
        except BadRequest as exc:
            _refuse(exchange, S3Error("InvalidRequest", str(exc)))
    except Hangup:
        conn.keep_alive = False
    finally:
        exchange.finish()


def _refuse(exchange: Exchange, error: S3Error) -> None:
    parts = leaf("Code", error.code), leaf("Message", error), leaf("Resource", exchange.subject)
    # Neither a HEAD nor a 304 may have a body.
    bare = exchange.request.method == "HEAD" or error.status == 304
    body = b"" if bare else markup.error_document(*parts)
    exchange.reply(error.status, {**reading.XML, **error.headers}, body)
