import subprocess
import sys


def test_without_torch_the_benchmark_says_what_to_install_before_it_measures() -> None:
    # None in sys.modules is what an import system without torch looks like.
    code = """
import sys
sys.modules["torch"] = None
from headrace.clients.cli.main import main
sys.exit(main(["bench", "learner", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        "learner needs the module torch, which is not installed; pip install 'headrace[train]' adds it" in done.stderr
    )
