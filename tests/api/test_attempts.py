"""Refused tokens are counted by address; good ones pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.api.attempts import BURST, PER_SECOND, Attempts, TooManyFailures

READ = f"/v1/blobs/sha256/{'0' * 64}"


def test_failures_run_out_and_come_back_with_time() -> None:
    moment = 100.0
    attempts = Attempts(clock=lambda: moment)
    for number in range(BURST):
        attempts.check("a", f"t{number}")
        attempts.failed("a", f"t{number}")
    with pytest.raises(TooManyFailures) as caught:
        attempts.check("a", "another")
    assert caught.value.headers["retry-after"] == str(int(1 / PER_SECOND))
    attempts.check("b", "another")
    moment += 1 / PER_SECOND
    attempts.check("a", "another")


def test_a_token_that_was_good_passes_until_it_is_refused() -> None:
    attempts = Attempts(clock=lambda: 0.0)
    attempts.good("mine")
    for number in range(BURST):
        attempts.failed("a", f"t{number}")
    attempts.check("a", "mine")
    attempts.failed("a", "mine")
    with pytest.raises(TooManyFailures):
        attempts.check("a", "mine")


@given(st.lists(st.one_of(st.floats(0, 10), st.none()), max_size=200))
def test_no_address_is_looked_up_more_often_than_allowed(steps: list[float | None]) -> None:
    moment = 0.0
    looked = 0
    attempts = Attempts(clock=lambda: moment)
    for step in steps:
        if step is not None:
            moment += step
            continue
        try:
            attempts.check("a", "guess")
        except TooManyFailures:
            continue
        looked += 1
        attempts.failed("a", "guess")
    assert looked <= BURST + moment * PER_SECOND + 1


def test_the_server_answers_429_before_it_looks_a_token_up(open_server: Callable[..., Any]) -> None:
    server = open_server(allow_anonymous=False)
    good = server.client(server.token("read"))
    assert good.get(READ).status_code == 404
    codes = [server.client(f"kd_guess{number}").get(READ).status_code for number in range(BURST + 10)]
    assert codes[:BURST] == [401] * BURST
    assert 429 in codes[BURST:]
    answer = server.client("kd_more").get(READ)
    if answer.status_code == 429:  # unless a failure came back in this moment
        assert answer.json()["type"].endswith(":too-many-failures")
        assert int(answer.headers["retry-after"]) >= 1
    assert good.get(READ).status_code == 404
