"""A worker is known to live for as long as it does."""

import threading

import psycopg

from headrace.ledger import Ledger
from headrace.ledger.database import Rows
from headrace.worker.heartbeat import Heartbeat

ALIVE = "SELECT count(*) FROM workers WHERE worker = 'w' AND alive_until > now()"


def test_a_worker_whose_other_calls_have_every_connection_still_says_that_it_lives(database_url: str) -> None:
    held, let_go = threading.Semaphore(0), threading.Event()

    def hold(cursor: Rows) -> None:
        held.release()
        let_go.wait(120)

    def alive() -> int:
        with psycopg.connect(database_url) as connection:
            ((count,),) = connection.execute(ALIVE).fetchall()
            return int(count)

    with Ledger(database_url, pool_size=2, retry_for=0.5) as ledger:
        calls = [threading.Thread(target=ledger._database.transaction, args=(hold,)) for _ in range(2)]
        for call in calls:
            call.start()
        assert held.acquire(timeout=120)
        assert held.acquire(timeout=120)
        try:
            heartbeat = Heartbeat(ledger, "w", "default", "model", alive_s=600.0)
            assert heartbeat.start(threading.Event())
            assert alive() == 1
            heartbeat.close()
            assert alive() == 0
        finally:
            let_go.set()
            for call in calls:
                call.join()
