"""What the smoke room refuses by name."""

from __future__ import annotations

from kernel_depot.errors import DepotError


class SmokeError(DepotError):
    """Base of the smoke room's failures."""

    slug = "smoke-failed"
    title = "The smoke test could not run"
    status = 500


class ElfRefused(SmokeError):
    """A file that is no whole ELF library for this host, so that loading it is not even tried."""

    slug = "elf-refused"
    title = "Not a library for this host"
    status = 422
