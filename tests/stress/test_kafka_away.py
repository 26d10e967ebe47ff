"""The broker restarts, or is away for longer than sessions and the producer's message timeout last."""

import signal
import time

import apache_kafka
import pytest
from fleet import TIERS, fleet

from headrace.worker.consumer import BATCH

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

AWAY_S = 70.0  # a record is given up by librdkafka after 60
PREFETCH = 100


def test_a_broker_that_restarts_again_and_again(own_kafka: apache_kafka.Broker, database_url: str) -> None:
    with fleet(own_kafka.bootstrap, database_url) as made:
        made.start(workers=2)
        for share, how in ((300, signal.SIGKILL), (900, signal.SIGTERM), (1500, signal.SIGKILL)):
            made.send(1000)
            made.wait_ended(share)
            own_kafka.kill(how)
            own_kafka.restart()
        made.settle()
        made.assert_books_balance()


@pytest.mark.parametrize("protocol", ["classic", "consumer"], indirect=True)
def test_a_broker_that_is_away_for_a_minute(
    own_kafka: apache_kafka.Broker, database_url: str, protocol: str
) -> None:
    with fleet(own_kafka.bootstrap, database_url, group_protocol=protocol, prefetch=PREFETCH) as made:
        made.start(workers=2)
        made.send(4000)
        made.wait_ended(500)
        with own_kafka.away():
            before = made.ended()
            time.sleep(AWAY_S)
            meanwhile = made.ended() - before
        made.settle()
        made.assert_books_balance()
        # librdkafka had fetched the rest, or most of it, but what it holds is not taken before there is room for it.
        assert meanwhile <= 2 * len(TIERS) * (PREFETCH + BATCH)
