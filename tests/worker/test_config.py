"""What each Kafka client of a worker is told."""

from headrace.worker.config import WorkerConfig


def test_each_client_is_told_what_its_kind_may_have() -> None:
    kafka = {"session.timeout.ms": "6000", "security.protocol": "PLAINTEXT", "linger.ms": "7"}
    config = WorkerConfig("127.0.0.1:1", kafka=kafka)
    for consumer in (config.consumer("bulk"), config.control()):
        assert consumer["session.timeout.ms"] == "6000"
        assert "linger.ms" not in consumer
    assert config.producer() == {
        "bootstrap.servers": "127.0.0.1:1",
        "client.id": config.name,
        "reconnect.backoff.ms": 500,
        "message.max.bytes": 20_000_000,
        "batch.size": 900_000,
        "security.protocol": "PLAINTEXT",
        "linger.ms": "7",
    }
