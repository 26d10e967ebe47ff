"""Put many requests to a text engine at once, and hear how each ends."""

from collections.abc import Sequence

from headrace.engine.text_engine import TextCompletion, TextEngine, TextRequest


def run(engine: TextEngine, requests: Sequence[TextRequest]) -> dict[str, TextCompletion]:
    """All completions by id; every request must end exactly once."""
    engine.add_many(requests)
    ended: list[TextCompletion] = []
    while len(ended) < len(requests):
        ended += engine.poll(60.0)
    assert sorted(done.id for done in ended) == sorted(request.id for request in requests)
    return {done.id: done for done in ended}
