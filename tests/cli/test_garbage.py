import gc
import subprocess
import sys


def test_what_is_imported_is_never_walked_again_and_the_rest_seldom() -> None:
    program = (
        "import gc; from headrace.cli.garbage import collect_seldom; collect_seldom();"
        "print(gc.get_freeze_count(), gc.get_threshold()[0], gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    frozen, threshold, enabled = done.stdout.split()
    assert int(frozen) > 1000
    assert int(threshold) > 10 * gc.get_threshold()[0]
    assert enabled == "True"
