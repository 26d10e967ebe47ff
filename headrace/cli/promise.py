"""What a batch that is followed is to have, and whether the job table shows that yet."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.cli.output import note

if TYPE_CHECKING:
    from headrace.client.announced import Announced
    from headrace.ledger import BatchProgress

KAFKA_AWAY_S = 60.0  # for which Kafka is asked in vain before the job table is believed


class Promise:
    """What was sent of a batch, as far as anybody has said; under an idempotency key that may be several sendings.

    The job table knows what the recorder has read, so what it calls complete may be an earlier sending. It is believed where
    it shows ``sending``. Else ``unread`` is asked, at each look, whether a close that the recorder has not confirmed will
    change what the batch expects; and where none will, the table once more, since it may have been recorded after the look
    and before the question. So whoever follows a sending that a later one took over from ends with that.

    expected: how many records there are to be at least. sending: the one followed, None where its name is not known. unread:
    raises BrokerUnreachable; None of a batch that is sent once.
    """

    def __init__(
        self,
        expected: int = 0,
        sending: str | None = None,
        unread: "Callable[[], Announced] | None" = None,
    ) -> None:
        self.expected = expected
        self._sending, self._unread = sending, unread
        self._settled = False  # nothing is on its way to the table that would change it
        self._away_since: float | None = None

    def kept(self, batch: "BatchProgress | None") -> bool:
        """Whether the batch, just looked at, is over, and not as it was before it was sent again."""
        if batch is None or not batch.over or (batch.expected or 0) < self.expected:
            self._settled = False
            return False
        shown = self._sending is not None and batch.submission == self._sending
        if shown or self._settled or self._unread is None:
            return True
        self._settled = self._is_settled(batch, self._unread)
        return False

    def _is_settled(self, batch: "BatchProgress", unread: "Callable[[], Announced]") -> bool:
        from headrace.client import BrokerUnreachable

        try:
            announced = unread()
        except BrokerUnreachable as error:
            return self._has_waited(batch.batch_id, error)
        if self._away_since is not None:
            note("Kafka is back.")
        self._away_since = None
        self.expected = max(self.expected, announced.expected or 0)
        return not announced.supersedes(batch.expected, batch.submission)

    def _has_waited(self, batch_id: str, error: Exception) -> bool:
        """Whether Kafka has been away for so long that the table is believed."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            note(
                f"Whether batch {batch_id} was sent again is not known ({error}); asking for {KAFKA_AWAY_S:g} s more."
            )
        if now - self._away_since < KAFKA_AWAY_S:
            return False
        note(f"Kafka stays away: what the job table says of batch {batch_id} is believed.")
        return True
