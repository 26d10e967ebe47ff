"""Clocks: a producer whose clock is wrong, ids on both sides of midnight, and sessions in odd time zones."""

import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from fleet import MakeFleet

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

HOUR_MS = 3_600_000


def now_ms() -> int:
    return int(time.time() * 1000)


@pytest.mark.parametrize("off_ms", [-HOUR_MS, HOUR_MS], ids=["behind", "ahead"])
def test_a_producer_whose_clock_is_an_hour_off(make_fleet: MakeFleet, off_ms: int) -> None:
    fleet = make_fleet()
    fleet.start(workers=2)
    fleet.send(2000, timestamp_ms=now_ms() + off_ms)
    fleet.settle()
    fleet.assert_books_balance()


def test_jobs_on_both_sides_of_midnight(make_fleet: MakeFleet) -> None:
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    at = int(midnight.timestamp() * 1000)
    fleet = make_fleet()
    fleet.start(workers=2)
    for off_ms in (-1000, -1, 0, 1, 1000):
        fleet.send(400, timestamp_ms=at + off_ms)
    fleet.settle()
    fleet.assert_books_balance()
    days = dict(fleet.line.query("SELECT tableoid::regclass::text, count(*) FROM jobs GROUP BY 1"))
    for day in (midnight - timedelta(days=1), midnight):
        assert days[f"jobs_{day:%Y%m%d}"] > 100


@pytest.mark.parametrize("zone", ["America/St_Johns", "Pacific/Kiritimati"])
def test_sessions_in_an_odd_time_zone(make_fleet: MakeFleet, database_url: str, zone: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        (name,) = connection.execute("SELECT current_database()").fetchone() or ("",)
        connection.execute(f"ALTER DATABASE {name} SET timezone = '{zone}'")  # type: ignore[arg-type]
    fleet = make_fleet()
    fleet.start(workers=2)
    fleet.send(2000)
    fleet.settle()
    assert fleet.line.query("SHOW timezone") == [(zone,)]
    fleet.assert_books_balance()
    odd = "SELECT count(*) FROM jobs WHERE abs(extract(epoch FROM finished_at - submitted_at)) > 1200"
    assert fleet.count(odd) == 0
