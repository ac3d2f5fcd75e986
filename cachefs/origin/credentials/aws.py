"""AWS credentials by botocore's own chain: environment, profiles, web identity, container, instance metadata.

botocore only asks the metadata service when nothing earlier in the chain answers, and refreshes what expires.
Only its session is used (8 MB); its S3 client would cost another 15 MB and 44 ms of CPU a LIST page
(measured)."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from cachefs.errors import ConfigError, PermissionDenied
from cachefs.origin.replies import one_line

WHERE = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the AWS config file",
    "iam-role": "the instance's role",
    "container-role": "the container's role",
}

UNSEEN = object()
"""No credentials were looked for yet, which is not the same as none found."""


class AwsCredentials:
    """Credentials of one mount. Thread-safe."""

    def __init__(self, profile: str | None, anonymous: bool) -> None:
        self.anonymous = anonymous
        self._profile = profile
        self._lock = threading.Lock()
        self._session: Any = None
        self._found: Any = None
        self._last: Any = UNSEEN
        self._changed_at = self._read_at = float("-inf")
        if profile is not None and not anonymous and profile not in self.session().available_profiles:
            known = ", ".join(self.session().available_profiles) or "none"
            raise ConfigError(f"no AWS profile {profile!r}; the config files have: {known}")

    def session(self) -> Any:
        """The botocore session, which knows the config files."""
        import botocore.session

        session = self._session
        if session is None:
            session = self._session = botocore.session.Session(profile=self._profile)
        return session

    def setting(self, name: str) -> str | None:
        """A setting of the profile, such as `region` or `endpoint_url`."""
        from botocore.exceptions import BotoCoreError

        try:
            value = self.session().get_scoped_config().get(name)
        except BotoCoreError:  # a profile named in the environment that is nowhere: `current` says so
            return None
        return value if isinstance(value, str) else None

    def current(self) -> Any:
        """Frozen credentials (access_key, secret_key, token) as they are now; None when anonymous."""
        if self.anonymous:
            return None
        with self._lock:
            return self._look()

    def renew(self, since: float) -> bool:
        """Read environment and files again, unless others have appeared since `since`, or another request has read
        them after this one was refused. True when those in use now differ from those at `since`."""
        if self.anonymous:
            return False
        refused_at = time.monotonic()
        with self._lock:
            if self._changed_at <= since and self._read_at < refused_at:
                self._read_at = time.monotonic()
                self._session = self._found = None
                try:
                    self._look()
                except PermissionDenied:
                    return False
            return self._changed_at > since

    def _look(self) -> Any:
        from botocore.exceptions import BotoCoreError

        frozen = None
        try:
            if self._found is None:
                self._found = self.session().get_credentials()
            frozen = self._found and self._found.get_frozen_credentials()
        except BotoCoreError as exc:
            raise PermissionDenied(one_line(f"AWS credentials cannot be had: {exc}")) from exc
        finally:
            if frozen != self._last:
                if self._last is not UNSEEN:  # the first ones are no change: nobody was refused before
                    self._changed_at = time.monotonic()
                self._last = frozen
        if frozen is None:
            raise PermissionDenied(
                "no AWS credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a --profile, "
                "or use --anonymous for a public bucket"
            )
        return frozen

    @property
    def advice(self) -> str:
        """What to change when the store refuses these credentials."""
        if self.anonymous:
            return "the mount is --anonymous; a private bucket needs credentials"
        rights = "s3:ListBucket and s3:GetObject (to write, s3:PutObject and s3:DeleteObject)"
        method = getattr(self._found, "method", None)
        if method is None:
            return f"renew the credentials, or grant them {rights}"
        where = WHERE.get(str(method), str(method))
        if method in ("shared-credentials-file", "config-file"):
            where += f" (profile {self._profile or os.environ.get('AWS_PROFILE', 'default')})"
        return f"credentials came from {where}: renew them, or grant them {rights}"
