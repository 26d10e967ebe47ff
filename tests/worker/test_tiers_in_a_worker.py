"""What tiers do to a worker's engine: the order it is fed in, and how much of it one tenant has."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline import Pipeline
from standin import StandInEngine

from headrace.engine.text_engine import TextCompletion, TextRequest
from headrace.worker import default_tiers


@dataclass
class CountingEngine(StandInEngine):
    """Notes the most requests of each tenant that it has held at once, and with which priority each came."""

    tenants: dict[str, str] = field(default_factory=dict)
    most: Counter[str] = field(default_factory=Counter)
    priorities: dict[str, int] = field(default_factory=dict)

    def add_many(self, requests: Sequence[TextRequest]) -> None:
        super().add_many(requests)
        self.tenants.update({request.id: request.salt for request in requests})
        self.priorities.update({request.id: request.priority for request in requests})
        for tenant, count in Counter(self.tenants.values()).items():
            self.most[tenant] = max(self.most[tenant], count)

    def poll(self, timeout: float) -> list[TextCompletion]:
        ended = super().poll(timeout)
        for each in ended:
            del self.tenants[each.id]
        return ended


def test_a_tenant_s_limit_holds_and_others_fill_the_rest(line: Pipeline, tmp_path: Path) -> None:
    tiers = tuple(replace(tier, tenant_limit=4) for tier in default_tiers(line.topics.tiers))
    for n in range(120):
        line.submit(f"until:{tmp_path / 'full'}", tenant="loud" if n % 4 else "quiet")
    line.flush()
    worker = line.start_worker(CountingEngine, tiers=tiers)
    line.wait_for(lambda: worker.engines and len(worker.engine.seen) == 8)
    line.wait_for(lambda: worker.worker.status().waiting["standard"] > 0)
    (tmp_path / "full").touch()
    line.wait_terminal(120)
    engine = worker.engine
    worker.close()

    assert isinstance(engine, CountingEngine)
    assert engine.most == {"loud": 4, "quiet": 4}
    assert line.states() == {"succeeded": 120}


def test_a_promoted_job_runs_with_the_priority_of_the_tier_it_was_promoted_to(
    line: Pipeline, tmp_path: Path
) -> None:
    interactive, standard, bulk = default_tiers(line.topics.tiers)
    tiers = (interactive, standard, replace(bulk, promote_after_s=0.5))
    worker = line.start_worker(CountingEngine, tiers=tiers, max_in_flight=2)
    running = line.submit(f"until:{tmp_path / 'then'}", tier="bulk")  # of two places, one is not for bulk
    line.flush()
    line.wait_for(lambda: worker.engines and worker.engine.seen)
    waited = line.submit("has waited", tier="bulk")
    line.wait_terminal(1)
    (tmp_path / "then").touch()
    line.wait_terminal(2)
    engine = worker.engine
    worker.close()

    assert isinstance(engine, CountingEngine)
    assert engine.priorities == {str(running): 2, str(waited): 1}
