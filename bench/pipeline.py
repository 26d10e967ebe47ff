"""The pipeline without its engine: what a job costs on its way from Kafka through the job table and back to Kafka.

    python bench/pipeline.py --out bench/results/pipeline.json

Apache Kafka, Postgres, one recorder and two workers, all on this machine. The jobs are on their topic before anything is
timed; the table is filled with rows of the same day. Then the recorder alone enters them, and after it the workers end
them: from their start to the last committed offset, joining the group included. Answers come at once (pipeline_process.py).

Postgres keeps what it commits (fsync on), as in production. CPU is counted for all processes of a part, user and system,
in microseconds a job: on a machine that others use as well it says more than the clock does. ``--stages`` also times the
stages inside recorder and workers, which slows them down.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "harness")]

import apache_kafka  # noqa: E402
import postgres  # noqa: E402
import psutil  # noqa: E402
import psycopg  # noqa: E402
import results_file  # noqa: E402
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition  # noqa: E402

from headrace.ledger import Ledger, partitions  # noqa: E402
from headrace.schemas import PromptJob, Sampling, Topics, encode_job, uuid7  # noqa: E402
from headrace.worker import WorkerConfig  # noqa: E402

POSTGRES = {
    "fsync": "on",
    "full_page_writes": "on",
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "timezone": "UTC",
}
JVM = ("-Xms512m", "-Xmx512m", "-XX:+UseSerialGC", "-Xshare:auto")
PARTITIONS = 8
TIER = "standard"
BATCH = "nightly-2026-11-29"
WORDS = "the quick brown fox jumps over a lazy dog and thinks about the price of milk in winter "
PROMPT = 430  # characters of text: with ids, names and options the record has 0.7 KB
ANSWER = 60  # likewise: the result has 500 B
SAMPLE_EVERY_S = 0.5

# Rows of jobs that ended today, in id order: as a table looks that has been written to since midnight.
FILL = """
CREATE TEMP TABLE filled ON COMMIT DROP AS
SELECT (lpad(to_hex({start} + n * {span} / {rows}), 12, '0') || '7000a' || substr(md5(n::text), 1, 15))::uuid AS id, n
FROM generate_series({first}::bigint, {last}) n;
INSERT INTO jobs (id, tenant, batch_id, custom_id, pool, tier, model, content_sha, src_topic, src_partition, src_offset,
                  state, run, attempt, submitted_at, finished_at, prompt_tokens, completion_tokens)
SELECT id, 'default', 'filled-' || n / 100000, 'line-' || n, 'default', 'standard', 'stand-in', sha256(n::text::bytea),
       'filled', n % 8, n, 2, 1, 1, now(), now(), 160, 64 FROM filled ORDER BY id;
INSERT INTO results (id, run, body)
SELECT id, 1, jsonb_build_object('id', id, 'state', 'succeeded', 'choices', jsonb_build_array(
    jsonb_build_object('index', 0, 'finish_reason', 'stop', 'text', repeat(md5(n::text), 10)))) FROM filled ORDER BY id;
INSERT INTO attempts (id, run, attempt, worker, group_size, ended_at)
SELECT id, 1, 1, 'gone', 0, now() FROM filled ORDER BY id;
"""


def fill(url: str, rows: int, at_once: int = 250_000) -> None:
    """``rows`` ended jobs, with results and attempts, in the partitions of today."""
    if not rows:
        return
    now = int(time.time() * 1000)
    midnight = partitions.first_id(partitions.today()).int >> 80
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        for first in range(0, rows, at_once):
            last = min(first + at_once, rows) - 1
            statement = FILL.format(start=midnight, span=now - midnight, rows=rows, first=first, last=last)
            with connection.transaction():
                connection.execute(statement)
        connection.execute("VACUUM ANALYZE jobs, results, attempts")
        connection.execute("CHECKPOINT")


def produce(bootstrap: str, topics: Topics, count: int) -> int:
    """Jobs on their topic; returns the bytes of one record's value."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 50, "compression.type": "lz4"})
    text = WORDS * 6
    size = 0
    for n in range(count):
        job = PromptJob(
            job_id=str(uuid7()),
            batch_id=BATCH,
            custom_id=f"line-{n}",
            model="stand-in",
            messages=[
                {"role": "system", "content": "Classify the text. Answer with one word."},
                {"role": "user", "content": f"{n} {text[n % 80 :][:PROMPT]}"},
            ],
            sampling=Sampling(max_tokens=64, temperature=0.0),
            metadata={"source": "bench"},
        )
        key, value, headers = encode_job(job)
        size = len(value)
        while True:
            try:
                producer.produce(topics.jobs(TIER), value, key, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(60)
    return size


# --- what is watched ------------------------------------------------------------------------------------------------


class Child:
    """A process of pipeline_process.py: imported and waiting for ``go``."""

    def __init__(self, name: str, told: dict[str, Any]) -> None:
        self.name = name
        command = [sys.executable, str(HERE / "pipeline_process.py"), json.dumps(told)]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self.seen = psutil.Process(self._process.pid)

    def go(self) -> None:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def check(self) -> None:
        assert self._process.poll() is None, f"{self.name} has ended"

    def stop(self) -> dict[str, Any]:
        """End it cleanly; what it says of its threads and stages."""
        self._process.terminate()
        said, _ = self._process.communicate(timeout=60)
        return json.loads(said.splitlines()[-1])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Postgres:
    """The server's processes: what its backends and its own processes have spent, also those that have ended."""

    def __init__(self, pid: int) -> None:
        self._postmaster = psutil.Process(pid)
        self._seen: dict[int, tuple[str, float]] = {}

    def seconds(self) -> dict[str, float]:
        for process in self._postmaster.children():
            try:
                kind = _kind(" ".join(process.cmdline()))
                self._seen[process.pid] = kind, _spent(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        seconds = {"backends": 0.0, "its own": 0.0}
        for kind, spent in self._seen.values():
            seconds[kind] += spent
        return seconds


def _kind(title: str) -> str:
    return "backends" if "127.0.0.1" in title else "its own"


def _spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass
class Watch:
    """Samples of a part while it runs, and its processes' CPU."""

    cpu: dict[str, Callable[[], dict[str, float]]]
    children: list[Child]
    samples: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began, self._before, self._machine = time.monotonic(), self._now(), psutil.cpu_times()

    def _now(self) -> dict[str, float]:
        return {
            f"{name} {part}".strip(): seconds
            for name, ask in self.cpu.items()
            for part, seconds in ask().items()
        }

    def sample(self, **counts: float) -> float:
        """Note counts and memory; returns the seconds since the start."""
        at = time.monotonic() - self._began
        memory = {f"{child.name} MB": child.seen.memory_info().rss / 1e6 for child in self.children}
        self.samples.append(
            {"s": round(at, 2), **counts, **{name: round(mb, 1) for name, mb in memory.items()}}
        )
        for child in self.children:
            child.check()
        return at

    def microseconds(self, jobs: int) -> dict[str, float]:
        """CPU a job of each process, and of all."""
        spent = {
            name: (seconds - self._before.get(name, 0.0)) / jobs * 1e6
            for name, seconds in self._now().items()
        }
        return {name: round(each, 1) for name, each in spent.items()} | {"all": round(sum(spent.values()), 1)}

    def machine(self) -> dict[str, float]:
        """Shares of the machine: idle, and taken by processes that are none of ours."""
        now = psutil.cpu_times()
        whole = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        ours = sum(seconds - self._before.get(name, 0.0) for name, seconds in self._now().items())
        idle = now.idle + now.iowait - self._machine.idle - self._machine.iowait
        return {
            "idle": round(max(0.0, idle / whole), 3),
            "others": round(max(0.0, 1.0 - (idle + ours) / whole), 3),
        }


class Offsets:
    """What a group has committed and where topics end; asked through one consumer that never joins."""

    def __init__(self, bootstrap: str, group: str) -> None:
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})

    def committed(self, topic: str) -> int:
        places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        try:
            return sum(max(each.offset, 0) for each in self._consumer.committed(places, timeout=20))
        except KafkaException:  # the group is so new that nobody coordinates it yet
            return 0

    def end(self, topic: str) -> int:
        places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        return sum(self._consumer.get_watermark_offsets(place, timeout=20)[1] for place in places)

    def close(self) -> None:
        self._consumer.close()


@dataclass
class Stack:
    """The parts that do not change: broker, database, topics."""

    broker: apache_kafka.Broker
    database: postgres.Server
    url: str
    topics: Topics

    def cpu(self, children: list[Child]) -> dict[str, Callable[[], dict[str, float]]]:
        assert self.broker.process is not None
        assert self.database.process is not None
        java = psutil.Process(self.broker.process.pid)
        asks: dict[str, Callable[[], dict[str, float]]] = {
            child.name: (lambda seen=child.seen: {"": _spent(seen)}) for child in children
        }
        return {
            **asks,
            "Postgres": Postgres(self.database.process.pid).seconds,
            "broker": lambda: {"": _spent(java)},
        }


@contextmanager
def stack(rows: int) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        broker = apache_kafka.start(JVM)
        cleanup.callback(broker.stop)
        database = postgres.server(**POSTGRES)
        cleanup.callback(database.stop)
        url = cleanup.enter_context(postgres.clone(database))
        with Ledger(url) as ledger:
            ledger.ensure_partitions()
        began = time.monotonic()
        fill(url, rows)
        print(f"{rows:,} rows are in the table after {time.monotonic() - began:.0f} s", flush=True)
        topics = Topics(prefix="bench")
        apache_kafka.create_topics(broker.bootstrap, topics.all, PARTITIONS)
        yield Stack(broker, database, url, topics)


# --- the two parts --------------------------------------------------------------------------------------------------


def run(
    stack: Stack, names: list[str], told: dict[str, Any], jobs: int, group: str, result: str | None
) -> dict[str, Any]:
    """Start the processes, wait until their group has committed everything, stop them; what was seen."""
    told = {
        **told,
        "bootstrap": stack.broker.bootstrap,
        "database_url": stack.url,
        "prefix": stack.topics.prefix,
    }
    topic = stack.topics.jobs(TIER)
    offsets = Offsets(stack.broker.bootstrap, group)
    children: list[Child] = []
    try:
        children += [Child(name, told) for name in names]
        watch = Watch(stack.cpu(children), children)
        for child in children:
            child.go()
        while (committed := offsets.committed(topic)) < jobs:
            ended = {} if result is None else {"published": offsets.end(result)}
            watch.sample(committed=committed, **ended)
            time.sleep(SAMPLE_EVERY_S)
        seconds = watch.sample(committed=committed)
        cpu, machine = watch.microseconds(jobs), watch.machine()
        said = {child.name: child.stop() for child in children}
    finally:
        for child in children:
            child.kill()
        offsets.close()
    return {
        "jobs_per_s": round(jobs / seconds),
        "steady_jobs_per_s": _steady(watch.samples, jobs),
        "seconds": round(seconds, 1),
        "cpu_us_per_job": cpu,
        "machine": machine,
        "us_per_job_by_thread": _each(said, "threads", jobs),
        "us_per_job_by_stage": _each(said, "stages", jobs),
        "torch": any(each["torch"] for each in said.values()),
        "peak_mb": {name: max(sample[f"{name} MB"] for sample in watch.samples) for name in names},
        "samples": watch.samples,
    }


def _steady(samples: list[dict[str, float]], jobs: int) -> int | None:
    """Jobs a second between the first sample past a tenth and the last before nine tenths."""
    inner = [each for each in samples if 0.1 * jobs <= each["committed"] <= 0.9 * jobs]
    if len(inner) < 2:
        return None
    return round((inner[-1]["committed"] - inner[0]["committed"]) / (inner[-1]["s"] - inner[0]["s"]))


def _each(said: dict[str, dict[str, Any]], what: str, jobs: int) -> dict[str, float]:
    """CPU a job by thread or stage, over all processes of the part, the largest first."""
    total: dict[str, float] = {}
    for each in said.values():
        for name, seconds in each[what].items():
            total[name] = total.get(name, 0.0) + seconds / jobs * 1e6
    return {name: round(us, 1) for name, us in sorted(total.items(), key=lambda item: -item[1]) if us >= 0.1}


def report(name: str, part: dict[str, Any]) -> None:
    print(
        f"\n{name}: {part['jobs_per_s']:,} jobs/s ({part['seconds']} s; steady {part['steady_jobs_per_s'] or 0:,})"
    )
    print("  CPU us a job:", "  ".join(f"{key} {value:g}" for key, value in part["cpu_us_per_job"].items()))
    print(
        f"  the machine:  idle {part['machine']['idle']:.0%}, others' processes {part['machine']['others']:.0%}"
    )
    print(
        "  by thread:   ",
        "  ".join(f"{key} {value:g}" for key, value in part["us_per_job_by_thread"].items()),
    )
    if part["us_per_job_by_stage"]:
        print(
            "  by stage:    ",
            "  ".join(f"{key} {value:g}" for key, value in part["us_per_job_by_stage"].items()),
        )
    print("  peak MB:     ", part["peak_mb"], flush=True)
    behind = [each["published"] - each["committed"] for each in part["samples"] if "published" in each]
    if behind:
        halves = behind[: len(behind) // 2], behind[len(behind) // 2 :]
        print(
            f"  published and not committed, at most: {max(halves[0])} in the first half, {max(halves[1])} in the second"
        )


def conditions(stack: Stack, options: argparse.Namespace) -> dict[str, Any]:
    with psycopg.connect(stack.url) as connection:
        version = connection.execute("SHOW server_version").fetchone()
    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "cpu": f"{len(cpu)} x {cpu[0]}",
        "load_before": os.getloadavg(),
        "broker": f"{stack.broker.kind}; {' '.join(JVM)}; {PARTITIONS} partitions",
        "postgres": f"{version[0] if version else ''}; " + ", ".join(f"{k}={v}" for k, v in POSTGRES.items()),
        "python": sys.version.split()[0],
        "command": " ".join(["python", "bench/pipeline.py", *without_out(sys.argv[1:])]),
        **{name: value for name, value in vars(options).items() if name != "out"},
    }


def without_out(arguments: list[str]) -> list[str]:
    """The arguments but for --out: a folder of this machine means nothing on another."""
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out")
    return out.parse_known_args(arguments)[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--filled", type=int, default=5_000_000, help="ended jobs in the table before")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=256, help="a worker's max_in_flight")
    parser.add_argument("--prefetch", type=int, help="a tier's prefetch; by default four times as many")
    parser.add_argument("--stages", action="store_true", help="time the stages inside the processes as well")
    parser.add_argument("--out", type=Path, help="write rows to this JSON file, a new one")
    options = parser.parse_args()
    if options.out and options.out.exists():  # the load before is a condition, and never the same
        parser.error(f"--out: {options.out} is there already, and holds another run; name another file")
    options.prefetch = options.prefetch or 4 * options.in_flight
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # broker, Postgres and workers end with it

    with stack(options.filled) as parts:
        told = conditions(parts, options)
        value_bytes = produce(parts.broker.bootstrap, parts.topics, options.jobs)
        print(f"{options.jobs:,} jobs of {value_bytes} B are on their topic", flush=True)

        group = f"{parts.topics.prefix}.recorder"
        recorder = run(
            parts, ["recorder"], {"role": "recorder", "stages": options.stages}, options.jobs, group, None
        )
        report("recorder alone", recorder)

        config = WorkerConfig(parts.broker.bootstrap, parts.topics)
        how = {
            "role": "worker",
            "stages": options.stages,
            "answer": (WORDS * 6)[:ANSWER],
            "in_flight": options.in_flight,
            "prefetch": options.prefetch,
        }
        names = [f"worker {n}" for n in range(options.workers)]
        group = config.consumer(TIER)["group.id"]
        workers = run(parts, names, how, options.jobs, group, parts.topics.results)
        report("workers", workers)
        check(parts, options.jobs)

    print(
        f"\nrecorder and workers together: {recorder['cpu_us_per_job']['all'] + workers['cpu_us_per_job']['all']:.0f} CPU us a job"
    )
    rows = [{"part": "recorder", **recorder}, {"part": "workers", **workers}]
    results_file.ResultsFile(options.out, value_bytes=value_bytes, **told).append(rows)


def check(stack: Stack, jobs: int) -> None:
    """Every job has ended well, and once."""
    with psycopg.connect(stack.url) as connection:
        done = connection.execute(
            "SELECT submitted, succeeded, running FROM batch_progress WHERE batch_id = %s", (BATCH,)
        ).fetchone()
        size = connection.execute(
            "SELECT avg(length(body::text))::int FROM results JOIN jobs USING (id) WHERE batch_id = %s",
            (BATCH,),
        ).fetchone()
    assert done == (jobs, jobs, 0), done
    print(f"  every job succeeded; a result has {size[0] if size else 0} B")


if __name__ == "__main__":
    main()
