"""What every operation needs: the depot that `create_app` was given."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from kernel_depot.jobs.depot import Depot


def depot_of(request: Request) -> Depot:
    """Return the depot this application serves."""
    depot: Depot = request.app.state.depot
    return depot


async def _depot(request: Request) -> Depot:
    """The same on the event loop: a plain function would cost each request a thread's time."""
    return depot_of(request)


DepotDependency = Annotated[Depot, Depends(_depot)]
