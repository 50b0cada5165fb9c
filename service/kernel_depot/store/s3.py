"""A store in S3-compatible object storage, reached with obstore."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store as Bucket

from kernel_depot.digest import is_sha256
from kernel_depot.liveness import is_dead, process_name
from kernel_depot.store.blobs import PIECE, Form, Recovery, StagedBlob
from kernel_depot.store.errors import BlobMissing, StoreLocationInvalid, StoreUnreachable

_DIRECTORIES = {Form.IDENTITY: "blobs", Form.ZSTD: "zstd", Form.PART: "parts"}
_PARALLEL = 16
_WHOLE = 64 << 20  # up to this size one conditional PUT; larger ones are multipart, completed atomically
_KNOWN = {"endpoint", "region", "path_style"}


class S3Store:
    """Blobs as objects `<prefix>/blobs/sha256/ab/<hex>`; every object appears whole or not at all."""

    def __init__(self, url: str, *, staging_dir: Path) -> None:
        """Read `s3://[key:secret@]bucket[/prefix][?endpoint=URL&region=NAME]`. Nothing is asked yet."""
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        if unknown := set(query) - _KNOWN:
            raise StoreLocationInvalid(
                "the store's URL has options that are not known",
                where=f"s3://{parts.hostname}",
                expected=", ".join(sorted(_KNOWN)),
                found=", ".join(sorted(unknown)),
            )
        prefix = parts.path.strip("/")
        bucket = parts.netloc.rpartition("@")[2]
        self._staging_dir = staging_dir
        self._base = f"{prefix}/" if prefix else ""
        endpoint = query["endpoint"][0] if "endpoint" in query else None
        self._location = f"s3://{bucket}/{prefix}" + (f"?endpoint={endpoint}" if endpoint else "")
        config: Any = {"virtual_hosted_style_request": query.get("path_style") == ["false"]}
        if endpoint is not None:
            config["endpoint"] = endpoint
        if parts.username is not None:
            config["access_key_id"] = unquote(parts.username)
            config["secret_access_key"] = unquote(parts.password or "")
        config["region"] = query.get("region", ["us-east-1"])[0]
        client: Any = {"timeout": timedelta(minutes=10), "connect_timeout": timedelta(seconds=10)}
        if endpoint is not None and endpoint.startswith("http://"):
            client["allow_http"] = True
        retry: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
        self._bucket = Bucket(bucket, config=config, client_options=client, retry_config=retry)

    @property
    def location(self) -> str:
        """The bucket's URL without credentials."""
        return self._location

    @property
    def publishes_by_rename(self) -> bool:
        """Every byte goes over the network."""
        return False

    def _key(self, sha256: str, form: Form) -> str:
        return f"{self._base}{_DIRECTORIES[form]}/sha256/{sha256[:2]}/{sha256}"

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Give a private directory on this machine, named by this process; removed on exit."""
        directory = self._staging_dir / process_name()
        directory.mkdir(mode=0o700, parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def publish(self, staged: StagedBlob, *, form: Form = Form.IDENTITY) -> None:
        """Create the object if it is absent; the loser of a race uses the winner's object."""
        key = self._key(staged.sha256, form)
        try:
            if staged.size <= _WHOLE:
                with suppress(AlreadyExistsError):
                    content = staged.path.read_bytes()
                    obstore.put(self._bucket, key, content, mode="create", use_multipart=False)
            elif self.size(staged.sha256, form=form) != staged.size:
                obstore.put(self._bucket, key, staged.path, use_multipart=True, chunk_size=16 << 20)
        except BaseError as error:
            raise self._unreachable(error) from error
        staged.path.unlink(missing_ok=True)

    def publish_many(self, staged: Sequence[StagedBlob], *, form: Form = Form.IDENTITY) -> None:
        """Publish in parallel; returns when every object is there."""
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="publish") as pool:
            for _ in pool.map(lambda blob: self.publish(blob, form=form), staged):
                pass

    def has(self, sha256s: Iterable[str], *, form: Form = Form.IDENTITY) -> set[str]:
        """Ask for each digest, or list once when there are many."""
        wanted = list(sha256s)
        if len(wanted) > 1000:
            return set(wanted) & set(self.list(form=form))
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="head") as pool:
            sizes = pool.map(lambda sha256: self.size(sha256, form=form), wanted)
            return {sha256 for sha256, size in zip(wanted, sizes, strict=True) if size is not None}

    def size(self, sha256: str, *, form: Form = Form.IDENTITY) -> int | None:
        """Ask for the object's size."""
        try:
            return obstore.head(self._bucket, self._key(sha256, form))["size"]
        except FileNotFoundError:
            return None
        except BaseError as error:
            raise self._unreachable(error) from error

    def path(self, sha256: str, *, form: Form = Form.IDENTITY) -> Path | None:  # noqa: ARG002
        """Return None: objects have no path."""
        return None

    def read(
        self, sha256: str, *, start: int = 0, end: int | None = None, form: Form = Form.IDENTITY
    ) -> Iterator[bytes]:
        """Yield the object's bytes; asked for before the first piece is."""
        if end is not None and end <= start:
            return iter(())
        options: Any = None
        if end is not None:
            options = {"range": (start, end)}
        elif start:
            options = {"range": {"offset": start}}
        try:
            result = obstore.get(self._bucket, self._key(sha256, form), options=options)
        except FileNotFoundError:
            raise BlobMissing(
                "the store does not hold these bytes", where=self.location, expected=f"sha256:{sha256}"
            ) from None
        except BaseError as error:
            raise self._unreachable(error) from error
        return self._pieces(result)

    def _pieces(self, result: obstore.GetResult) -> Iterator[bytes]:
        try:
            for chunk in result.stream(min_chunk_size=PIECE):
                data = bytes(chunk)
                for start in range(0, len(data), PIECE):
                    yield data[start : start + PIECE]
        except BaseError as error:
            raise self._unreachable(error) from error

    def delete(self, sha256: str, *, form: Form = Form.IDENTITY) -> None:
        """Delete the object."""
        try:
            with suppress(FileNotFoundError):
                obstore.delete(self._bucket, self._key(sha256, form))
        except BaseError as error:
            raise self._unreachable(error) from error

    def list(self, *, form: Form = Form.IDENTITY) -> Iterator[str]:
        """Yield the digests of all objects, page by page."""
        try:
            for page in obstore.list(self._bucket, f"{self._base}{_DIRECTORIES[form]}/sha256"):
                for item in page:
                    name = item["path"].rpartition("/")[2]
                    if is_sha256(name):
                        yield name
        except BaseError as error:
            raise self._unreachable(error) from error

    def presign(self, sha256: str, *, expires: int, form: Form = Form.IDENTITY) -> str | None:
        """Sign a GET of the object."""
        return obstore.sign(self._bucket, "GET", self._key(sha256, form), timedelta(seconds=expires))

    def recover(self) -> Recovery:
        """Remove what dead processes of this machine left on their way to the bucket."""
        removed = 0
        if self._staging_dir.is_dir():
            for directory in self._staging_dir.iterdir():
                if is_dead(directory.name):
                    shutil.rmtree(directory, ignore_errors=True)
                    removed += 1
        return Recovery(removed=removed)

    def settle(self, *, older_than: float = 0.0) -> None:
        """Do nothing: object storage answers when the bytes are durable."""

    def _unreachable(self, error: BaseError) -> StoreUnreachable:
        return StoreUnreachable(
            "the object storage does not answer as it should",
            where=self.location,
            found=str(error).splitlines()[0],
            remedy="check the endpoint, the bucket and the credentials",
        )
