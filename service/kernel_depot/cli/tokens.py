"""`kernel-depot tokens`: bearer tokens, straight in the catalog."""

from __future__ import annotations

import getpass
import os
import re
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernel_depot.cli.render import print_json
from kernel_depot.errors import DepotError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kernel_depot.catalog.tables import Token

app = typer.Typer(no_args_is_help=True)
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
DataDir = Annotated[Path | None, typer.Option(help="Where the embedded catalog lies; ./.depot by default.")]
DatabaseUrl = Annotated[str | None, typer.Option(help="The catalog's URL, when it is not the embedded one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class DurationInvalid(DepotError):
    """A duration that cannot be read."""

    slug = "duration-invalid"
    title = "Not a duration"
    status = 400


class TokenUnknown(DepotError):
    """An id that names no token."""

    slug = "token-unknown"
    title = "No such token"
    status = 404


class ScopeName(str, Enum):
    """What a token allows; each includes the ones before it."""

    READ = "read"
    NODE = "node"
    ADMIN = "admin"


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Who or what the token is for.")],
    scope: Annotated[
        ScopeName, typer.Option(help="What it allows; admin includes node, node includes read.")
    ],
    expires: Annotated[
        str | None, typer.Option(help="How long it is valid: 12h, 90d, 52w; for ever by default.")
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Create a token and print its secret: the only time it is shown, since only its SHA-256 is kept."""
    from kernel_depot.catalog import changes, record
    from kernel_depot.catalog.database import writing

    expires_at = datetime.now(timezone.utc) + _duration(expires) if expires is not None else None
    engine = _catalog(data_dir, database_url)
    with writing(engine) as session:
        token, secret = record.create_token(session, name=name, scopes=[scope.value], expires_at=expires_at)
        facts = _facts(token)
        told = {"name": name, "scopes": [scope.value], "expires_at": facts["expires_at"]}
        changes.audit(session, who=_who(), action="token-created", subject=token.id, facts=told)
    engine.dispose()
    if as_json:
        print_json({**facts, "secret": secret})
        return
    until = f"valid until {facts['expires_at']}" if facts["expires_at"] else "valid until revoked"
    typer.echo(f"token {token.id} for {name!r}, scope {scope.value}, {until}; its secret is shown only now:")
    typer.echo(secret)


@app.command("list")
def list_tokens(data_dir: DataDir = None, database_url: DatabaseUrl = None, as_json: Json = False) -> None:
    """List all tokens; never their secrets."""
    from kernel_depot.catalog import queries
    from kernel_depot.catalog.database import reading

    engine = _catalog(data_dir, database_url)
    with reading(engine) as session:
        tokens = [_facts(token) for token in queries.tokens(session)]
    engine.dispose()
    if as_json:
        print_json(tokens)
        return
    if not tokens:
        typer.echo("no tokens; make one with `kernel-depot tokens create`")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "name", "scope", "state", "created", "expires", "last used")
    for token in tokens:
        table.add_row(
            token["id"],
            token["name"],
            ", ".join(token["scopes"]),
            token["state"],
            *(token[moment] or "-" for moment in ("created_at", "expires_at", "last_used_at")),
        )
    Console().print(table)


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The id that `tokens list` shows.")],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Revoke a token: a second later every request that carries it is refused."""
    from kernel_depot.catalog import changes, record
    from kernel_depot.catalog.database import writing

    engine = _catalog(data_dir, database_url)
    with writing(engine) as session:
        token = record.revoke_token(session, token_id)
        facts = _facts(token) if token is not None else None
        if facts is not None:
            told = {"name": facts["name"]}
            changes.audit(session, who=_who(), action="token-revoked", subject=token_id, facts=told)
    engine.dispose()
    if facts is None:
        raise TokenUnknown(
            f"there is no token {token_id!r}", found=token_id, remedy="see `kernel-depot tokens list`"
        )
    if as_json:
        print_json(facts)
    else:
        typer.echo(f"token {token_id} ({facts['name']}) is revoked")


def _who() -> str:
    """Name the person at this command line, for the audit log."""
    try:
        return f"cli: {getpass.getuser()}"
    except (KeyError, OSError):  # a user id without a name
        return f"cli: user {os.getuid()}"


def _catalog(data_dir: Path | None, database_url: str | None) -> Engine:
    """Open the catalog; an embedded one is made when it is new, another must have the schema we know."""
    from kernel_depot.catalog.database import check_schema, open_database, upgrade
    from kernel_depot.settings import load_settings

    settings = load_settings(data_dir=data_dir, database_url=database_url)
    engine = open_database(settings.catalog_url)
    if settings.database_url is None:
        upgrade(engine)
    else:
        check_schema(engine)
    return engine


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9][0-9]{0,4})([mhdw])", text.strip().lower())
    if match is None:
        raise DurationInvalid(
            f"{text!r} is not a duration", where="--expires", expected="30m, 12h, 90d or 52w", found=text
        )
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _facts(token: Token) -> dict[str, Any]:
    now = datetime.now(timezone.utc)
    expires = _utc(token.expires_at)
    state = "valid"
    if expires is not None and expires <= now:
        state = "expired"
    if token.revoked_at is not None:
        state = "revoked"
    return {
        "id": token.id,
        "name": token.name,
        "scopes": token.scopes,
        "state": state,
        "created_at": _text(token.created_at),
        "expires_at": _text(token.expires_at),
        "revoked_at": _text(token.revoked_at),
        "last_used_at": _text(token.last_used_at),
    }


def _utc(moment: datetime | None) -> datetime | None:
    """SQLite returns moments without their zone; all are kept in UTC."""
    return moment.replace(tzinfo=timezone.utc) if moment is not None and moment.tzinfo is None else moment


def _text(moment: datetime | None) -> str | None:
    aware = _utc(moment)
    return aware.isoformat(timespec="seconds") if aware is not None else None
