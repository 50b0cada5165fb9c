"""Many nodes that wait are woken by and by, and told to spread what they begin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from kernel_depot.catalog import changes
from kernel_depot.catalog.database import open_database, upgrade, writing
from kernel_depot.fleet.watch import Watch


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = open_database(f"sqlite:///{tmp_path / 'catalog.sqlite'}")
    upgrade(made)
    yield made
    made.dispose()


def bump(engine: Engine) -> None:
    with writing(engine) as session:
        changes.touch_fleet(session)


def test_all_who_wait_hear_of_a_change_and_are_told_to_spread(engine: Engine) -> None:
    watch = Watch(engine)

    async def run(count: int) -> list[bool]:
        seen = watch.outlook().version
        waits = [asyncio.create_task(watch.changed(seen, timeout=60)) for _ in range(count)]
        await asyncio.sleep(0.1)
        bump(engine)
        return await asyncio.gather(*waits)

    assert asyncio.run(run(10)) == [True] * 10
    assert watch.spread == 0
    watch = Watch(engine)
    assert asyncio.run(run(120)) == [True] * 120
    assert watch.spread == pytest.approx(120 / 20)


def test_a_change_before_the_wait_ends_it_at_once(engine: Engine) -> None:
    watch = Watch(engine)
    seen = watch.outlook().version
    bump(engine)
    assert asyncio.run(watch.changed(seen, timeout=60))


def test_nobody_waits_for_a_server_that_ends(engine: Engine) -> None:
    watch = Watch(engine)

    async def run() -> bool:
        wait = asyncio.create_task(watch.changed(watch.outlook().version, timeout=3600))
        await asyncio.sleep(0.1)
        watch.close()
        return await asyncio.wait_for(wait, 30)

    assert asyncio.run(run()) is False
    assert asyncio.run(watch.changed(watch.outlook().version, timeout=3600)) is False


def test_the_picture_is_had_without_a_query_while_somebody_waits(engine: Engine) -> None:
    watch = Watch(engine)

    async def run() -> None:
        assert watch.followed() is None
        outlook = watch.outlook()
        wait = asyncio.create_task(watch.changed(outlook.version, timeout=60))
        await asyncio.sleep(1.0)
        assert watch.followed() is outlook
        bump(engine)
        assert await wait
        assert watch.followed() is None  # the picture is of the version before
        assert watch.outlook().version == outlook.version + 1

    asyncio.run(run())
