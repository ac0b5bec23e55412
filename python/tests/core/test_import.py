"""The cost of importing ferry, and what it imports."""

import os
import subprocess
import sys


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ).stdout


def test_no_heavy_imports():
    heavy = "{'numpy', 'torch', 'cupy', 'ml_dtypes', 'mpi4py'}"
    assert run(f"import sys, ferry; print({heavy} & set(sys.modules))").strip() == "set()"


def test_plug_ins_import_no_host():
    heavy = "{'numpy', 'torch', 'transformers', 'flashinfer'}"
    assert run(f"import sys, ferry.integrations.flashinfer, ferry.integrations.transformers; print({heavy} & set(sys.modules))").strip() == "set()"


def test_import_takes_less_than_150_ms():
    # CPU time of the import alone, the least of five: other work on the machine must not count.
    code = "import time; t = time.process_time(); import ferry; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.150
