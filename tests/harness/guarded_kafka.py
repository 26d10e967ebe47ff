"""An Apache Kafka that lets nobody in without TLS, and nobody without a name: a SCRAM or PLAIN login, or a certificate."""

import apache_kafka
from certificates import Certificates

USER, PASSWORD = "pipeline", "open-sesame"


class GuardedKafka:
    """bootstrap: the listener that asks for a login. bootstrap_mtls: the one that asks for a certificate.

    login, certificate: librdkafka properties that either lets in.
    """

    def __init__(self, certificates: Certificates) -> None:
        jars = apache_kafka.jar_directory()
        assert jars is not None, "needs Apache Kafka's jars"
        sasl, mutual, controller = apache_kafka.free_ports(3)
        self.bootstrap, self.bootstrap_mtls = f"localhost:{sasl}", f"localhost:{mutual}"
        authority = {"ssl.ca.location": str(certificates.authority)}
        self.login = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            **authority,
        }
        self.certificate = {
            "security.protocol": "SSL",
            "ssl.certificate.location": str(certificates.client.certificate),
            "ssl.key.location": str(certificates.client.key),
            **authority,
        }
        settings = _settings(certificates, sasl, mutual, controller)
        self._broker = apache_kafka.launch(
            jars, self.bootstrap, settings, users={USER: PASSWORD}, client=self.login
        )

    def stop(self) -> None:
        self._broker.stop()


def _settings(certificates: Certificates, sasl: int, mutual: int, controller: int) -> dict[str, object]:
    addresses = f"SASL_SSL://localhost:{sasl},SSL://localhost:{mutual}"
    module = "org.apache.kafka.common.security"
    return {
        **apache_kafka.node(controller),
        "listeners": f"{addresses},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": addresses,
        "listener.security.protocol.map": "SASL_SSL:SASL_SSL,SSL:SSL,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": certificates.server.both,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": certificates.authority,
        "listener.name.ssl.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": (
            f'{module}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
        ),
    }
