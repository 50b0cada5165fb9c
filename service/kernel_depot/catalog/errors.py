"""What can go wrong with the catalog."""

from __future__ import annotations

from kernel_depot.errors import DepotError


class CatalogError(DepotError):
    """The root of the catalog's failures."""

    slug = "catalog-failed"
    title = "The catalog failed"
    status = 503


class DatabaseUrlInvalid(CatalogError):
    """A database URL that names no database we know."""

    slug = "database-url-invalid"
    title = "Not a database URL"
    status = 400


class DatabaseUnreachable(CatalogError):
    """The database does not answer."""

    slug = "database-unreachable"
    title = "The database cannot be reached"


class SchemaBehind(CatalogError):
    """The database's schema is older than this program's, or was never made."""

    slug = "schema-behind"
    title = "The catalog's schema is behind"


class SchemaUnknown(CatalogError):
    """The database's schema is none that this program knows, such as a later one."""

    slug = "schema-unknown"
    title = "The catalog's schema is not known"
