"""A worker's engine at the end of the worker's process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import os, sys, time
    from pathlib import Path

    started = Path(sys.argv[1])
    if __name__ == "__mp_main__":  # the engine's process, which reads this first: it hangs while its parent lives
        parent = os.getppid()
        started.with_suffix(".new").write_text(str(os.getpid()))
        started.with_suffix(".new").rename(started)
        while os.getppid() == parent:
            time.sleep(0.1)
        sys.exit()

    from standin import StandInEngine

    from headrace.engine import EngineConfig, EngineProcess
    from headrace.engine.errors import EngineDead
    from headrace.worker.running import Running

    engines = iter([StandInEngine])
    running = Running(lambda: next(engines, lambda: EngineProcess(EngineConfig(model="nowhere")))())
    running.bury(EngineDead("of a test"))
    while not started.exists():
        running.reopen()
        time.sleep(0.01)
    running.close()
"""


def test_a_process_ends_though_another_engine_is_being_opened_and_takes_that_ones_process_with_it(
    tmp_path: Path,
) -> None:
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(textwrap.dedent(SCRIPT))
    parent = subprocess.Popen(
        [sys.executable, script, started], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        assert parent.wait(120) == 0
    finally:
        parent.kill()
        parent.wait()
    with pytest.raises(FileNotFoundError):
        Path(f"/proc/{started.read_text()}/stat").read_text()
