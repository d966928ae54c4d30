"""ImageSources: pictures that a request names, by data URL, by an allowed file, or, if enabled, by address."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from openk3.config.http import ServerConfig
from openk3.inputs.images import ImageError, ImagePatches, MediaConfig, preprocess_image
from openk3.serve.errors import ApiError, bad_request
from openk3.serve.fetch import FetchError, fetch


@dataclass(frozen=True)
class ImageSources:
    """Reads pictures within the server's limits. `max_tokens` is the most that one picture may take of the context."""

    config: ServerConfig
    media: MediaConfig
    max_tokens: int

    def read(self, url: str, param: str) -> ImagePatches:
        """The patches of a picture. Raises ApiError naming `param`: 400, 403 if it is not allowed, 413 if too large."""
        data = self._bytes(url, param)
        if len(data) > self.config.max_image_bytes:
            raise ApiError(
                413,
                f"{param}: {len(data):,} bytes, and a picture may have {self.config.max_image_bytes:,}",
                param=param,
                code="image_too_large",
            )
        try:
            return preprocess_image(data, self.media, max_tokens=self.max_tokens)
        except ImageError as error:
            raise bad_request(param, str(error).removeprefix("image: "), "invalid_image") from None

    def _bytes(self, url: str, param: str) -> bytes:
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return _data_url(url, param)
        if scheme == "file":
            return self._file(url, param)
        if scheme in ("http", "https"):
            if not self.config.fetch_images:
                message = "this server fetches nothing; send the picture as a data: URL"
                raise ApiError(403, f"{param}: {message}", param=param, code="fetching_disabled")
            try:
                return fetch(url, self.config.max_image_bytes)
            except FetchError as error:
                raise bad_request(param, str(error), "image_fetch_failed") from None
        raise bad_request(param, "expected a data:, file: or http(s): URL", "invalid_image_url")

    def _file(self, url: str, param: str) -> bytes:
        """A file below one of the allowed folders, links followed first; opened once, so that it cannot be swapped."""
        parts = urlsplit(url)
        denied = ApiError(
            403, f"{param}: no file that this server may read", param=param, code="file_not_allowed"
        )  # the same whether it exists or not
        if parts.netloc not in ("", "localhost") or "\0" in unquote(parts.path):
            raise denied
        real = Path(os.path.realpath(unquote(parts.path)))
        folders = [Path(os.path.realpath(folder)) for folder in self.config.image_folders]
        if not any(real.is_relative_to(folder) for folder in folders):
            raise denied
        try:
            handle = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise denied from None
        try:
            opened = Path(os.path.realpath(f"/proc/self/fd/{handle}"))
            inside = any(opened.is_relative_to(folder) for folder in folders)
            if not stat.S_ISREG(os.fstat(handle).st_mode) or not inside:
                raise denied
            with open(handle, "rb", closefd=False) as file:
                return file.read(self.config.max_image_bytes + 1)
        finally:
            os.close(handle)


def _data_url(url: str, param: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise bad_request(param, "a data: URL has a comma before its data", "invalid_image_url")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        raise bad_request(param, "the data: URL is not base64", "invalid_image_url") from None
