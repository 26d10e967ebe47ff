import gc
import subprocess
import sys


def run(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_what_is_imported_is_never_walked_again_and_the_rest_seldom() -> None:
    frozen, threshold, enabled = run(
        "import gc; from headrace.cli.interpreter import collect_seldom; collect_seldom();"
        "print(gc.get_freeze_count(), gc.get_threshold()[0], gc.isenabled())"
    )
    assert int(frozen) > 1000
    assert int(threshold) > 10 * gc.get_threshold()[0]
    assert enabled == "True"


def test_turns_are_shorter_than_pythons_own() -> None:
    own, short = run(
        "import sys; from headrace.cli.interpreter import take_short_turns;"
        "print(sys.getswitchinterval()); take_short_turns(); print(sys.getswitchinterval())"
    )
    assert float(short) < float(own)
