"""Objects below an address: whole, checked, retried. The only module that knows boto3.

Credentials, region and endpoint come from where every program for S3 takes them (AWS_PROFILE, AWS_ACCESS_KEY_ID,
AWS_REGION, AWS_ENDPOINT_URL, ~/.aws, a machine's role); none are asked for, kept or printed here.
https://boto3.amazonaws.com/v1/documentation/api/latest/guide/configuration.html
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.atomic import replacing, write_bytes
from pipeline.object_store.address import Address
from pipeline.object_store.failures import ABSENT, NOT_DONE, NOT_MET, StoreError, code_of, explained
from pipeline.object_store.keys import refuse_unsafe
from shims.errors import UsageError

_MIB = 1 << 20
_WHOLE = 32 * _MIB
"""Bytes up to which an object goes in one request; above, in parts, side by side."""
_PARTS_AT_ONCE = 8
_TRIES = 6
_CONNECTIONS = 64


@dataclass(frozen=True)
class Found:
    """An object, as a listing or a question for it tells."""

    name: str
    """Below the address."""
    size: int
    etag: str = ""


def require_boto3(flag: str) -> None:
    """Refuse early.

    Raises:
        UsageError: boto3 is not installed.
    """
    try:
        import boto3  # noqa: F401
    except ImportError as error:
        raise UsageError(
            flag,
            "boto3, which speaks to object stores",
            f"it cannot be imported: {error}",
            "pip install 'specshim[s3]' (on every machine), or give a folder",
        ) from error


class Bucket:
    """The objects below an address. Its methods may be called from any thread, and after a fork."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def upload(self, name: str, content: bytes) -> None:
        """Write an object; it is there whole, or as it was before. Its size is asked for afterwards.

        Raises:
            SpecshimError: the store did not take it, or has something else.
        """
        with self._told(name):
            if len(content) <= _WHOLE:
                self._s3.put_object(**self._key(name), Body=content)
            else:
                self._s3.upload_fileobj(io.BytesIO(content), *self._key(name).values(), Config=_parts())
        self._confirm(name, len(content))

    def upload_file(self, name: str, path: Path) -> None:
        """The same with a file's content, which is read in parts."""
        size = path.stat().st_size
        with self._told(name):
            self._s3.upload_file(str(path), *self._key(name).values(), Config=_parts())
        self._confirm(name, size)

    def put_if(self, name: str, content: bytes, etag: str | None = None) -> str | None:
        """Write an object under a condition.

        Args:
            etag: what has to be there now; None: nothing.

        Returns:
            The new etag; None where the condition does not hold.

        Raises:
            UsageError: the store has no conditions.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        with self._told(name):
            try:
                return str(self._s3.put_object(**self._key(name), Body=content, **condition)["ETag"])
            except Exception as error:
                if code_of(error) in (*NOT_MET, *ABSENT):
                    return None
                if code_of(error) in NOT_DONE:
                    raise without_conditions(self.address, code_of(error)) from error
                raise

    def head(self, name: str) -> Found | None:
        """What an object is; None where there is none."""
        with self._told(name):
            try:
                answer = self._s3.head_object(**self._key(name))
            except Exception as error:
                if code_of(error) in ABSENT:
                    return None
                raise
        return Found(name, int(answer["ContentLength"]), str(answer["ETag"]))

    def read(self, name: str, start: int = 0, length: int | None = None) -> tuple[bytes, Found]:
        """Bytes of an object, from ``start``; fewer than ``length`` where it ends before.

        Raises:
            FileNotFoundError: there is no such object.
            SpecshimError: the store did not give them.
        """
        span = {} if length is None and not start else {"Range": _range(start, length)}
        with self._told(name):
            for wait in [*(0.2 * 2**n for n in range(_TRIES - 1)), None]:
                try:
                    answer = self._s3.get_object(**self._key(name), **span)
                    content = bytes(answer["Body"].read())
                    break
                except Exception as error:
                    if code_of(error) in ABSENT:
                        raise FileNotFoundError(self.address.of(name)) from error
                    if code_of(error) in ("InvalidRange", "416"):  # it ends before
                        return b"", self.head(name) or Found(name, 0)
                    # What the library's own retries do not cover: the connection was lost within the body.
                    if wait is None or code_of(error) or type(error).__name__ not in _CUT_OFF:
                        raise
                time.sleep(wait)
        whole = str(answer.get("ContentRange", "")).rpartition("/")[2]
        return content, Found(name, int(whole) if whole.isdecimal() else len(content), str(answer["ETag"]))

    def download(self, name: str, path: Path) -> None:
        """An object as a file, which is whole or absent.

        Raises:
            FileNotFoundError: there is no such object.
        """
        content, found = self.read(name, 0, _WHOLE)
        if found.size == len(content):
            write_bytes(path, content)
            return
        with replacing(path, "wb") as handle:
            with self._told(name):
                self._s3.download_fileobj(*self._key(name).values(), handle, Config=_parts())
            got = handle.tell()
            if got != found.size:
                raise StoreError(self.address.of(name), f"{found.size} bytes", f"{got}", "run the same command again")

    def list(self, below: str = "") -> Iterator[Found]:
        """All objects whose names begin with ``below``, a thousand a request.

        Raises:
            StoreError: a name that leads elsewhere.
        """
        prefix = f"{self.address.prefix}/"
        with self._told(below):
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=prefix + below
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    name = str(entry["Key"])[len(prefix) :]
                    if not name:  # a console's mark of a folder
                        continue
                    yield Found(refuse_unsafe(name, self.address.of(name)), int(entry["Size"]), str(entry["ETag"]))

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        with self._told(name):
            self._s3.delete_object(**self._key(name))

    def abort_unfinished(self) -> int:
        """Let go of what killed processes had begun to upload in parts: nobody sees it, but it is paid for.

        Returns:
            How many there were; 0 where the store cannot tell.
        """
        count = 0
        with self._told(""):
            try:
                pages = self._s3.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self.address.bucket, Prefix=f"{self.address.prefix}/"
                )
                for upload in (upload for page in pages for upload in page.get("Uploads", ())):
                    self._s3.abort_multipart_upload(
                        Bucket=self.address.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    count += 1
            except Exception as error:
                # A convenience: an identity without this permission, or a store without this request, can do all else.
                if not code_of(error):
                    raise
        return count

    def _confirm(self, name: str, size: int) -> None:
        found = self.head(name)
        if found is None or found.size != size:
            raise StoreError(
                self.address.of(name),
                f"an object of the {size} bytes that were sent",
                "none" if found is None else f"one of {found.size} bytes",
                "the store may not know the client's checksums: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required, "
                "then run the same command again",
            )

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self.address.bucket, "Key": f"{self.address.prefix}/{name}"}

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Errors of the library become ours; those of the file system and ours stay."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.exceptions import HTTPClientError as ConnectionFailed

        try:
            yield
        except (Boto3Error, BotoCoreError, ClientError, ConnectionFailed, ValueError) as error:
            cause = error.__context__ if isinstance(error, Boto3Error) and error.__context__ else error
            told = cause if isinstance(cause, Exception) else error
            raise explained(told, self.address.of(name) if name else str(self.address)) from error

    @property
    def _s3(self) -> Any:
        return clients.of_this_process()


def without_conditions(address: Address, found: str) -> UsageError:
    """The refusal of a store in which two writers could not tell each other."""
    return UsageError(
        str(address),
        "a store with conditional writes (If-None-Match and If-Match), which keep a second writer out",
        found,
        "write to a file system and copy the finished folder, or use a store that has them",
    )


_CUT_OFF = (
    "IncompleteReadError", "ReadTimeoutError", "ResponseStreamingError", "ConnectionClosedError", "ConnectionError",
    "HTTPClientError", "FlexibleChecksumError",
)  # fmt: skip


class _Clients:
    """One client a process: it takes a while to make, and its connections cannot be shared by two."""

    def __init__(self) -> None:
        self._made: tuple[int, Any] | None = None
        self._making = threading.Lock()

    def of_this_process(self) -> Any:
        """The client; made at the first call, and again after a fork."""
        made = self._made
        if made is None or made[0] != os.getpid():
            if made is not None:
                self._making = threading.Lock()  # the one of before a fork may be held for ever
            with self._making:
                made = self._made
                if made is None or made[0] != os.getpid():
                    made = self._made = os.getpid(), _client()
        return made[1]

    def forget(self) -> None:
        """Read the environment anew at the next call."""
        self._made = None


clients = _Clients()


def _range(start: int, length: int | None) -> str:
    return f"bytes={start}-{'' if length is None else start + length - 1}"


def _client() -> Any:
    import boto3
    from botocore.config import Config

    bounded: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60, "max_pool_connections": _CONNECTIONS}
    if not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys():
        # Exponential, up to 20 s between two tries; slow-down answers are waited out, too.
        bounded["retries"] = {"mode": "standard", "total_max_attempts": _TRIES}
    return boto3.session.Session().client("s3", config=Config(**bounded))


def _parts() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(multipart_threshold=_WHOLE, multipart_chunksize=_WHOLE // 2, max_concurrency=_PARTS_AT_ONCE)
