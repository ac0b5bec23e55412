"""What `import deep_ep` and its modules find after install(), with PyTorch and without."""

import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

import ferry
import ferry.deep_ep as deep_ep


REPOSITORY = pathlib.Path(__file__).parents[3]


def run(program, *folders):
    """Runs a program that can import from `folders` too."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100, env=os.environ | {"PYTHONPATH": path})


def test_the_alias_has_what_the_package_has():
    run("""if True:
        import ferry.deep_ep as deep_ep

        assert deep_ep.buffer.Buffer is deep_ep.Buffer and deep_ep.buffer.Config is deep_ep.Config
        assert deep_ep.utils.EventOverlap is deep_ep.EventOverlap and deep_ep.utils.EventHandle is deep_ep.EventHandle
        assert deep_ep.hybrid_ep_buffer.HybridEPBuffer is deep_ep.HybridEPBuffer
        import ferry
        assert deep_ep.__version__ == ferry.__version__
        """)


def test_install():
    run("""if True:
        import ferry.deep_ep
        ferry.deep_ep.install()

        import deep_ep
        import deep_ep._buffer
        import deep_ep.buffer
        import deep_ep.utils.event
        import deep_ep_cpp
        from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap
        from deep_ep.buffer import Buffer as of_buffer
        from deep_ep.buffers.elastic import ElasticBuffer as of_elastic, EPHandle as handle_of_elastic
        from deep_ep.buffers.legacy import Buffer as of_legacy
        from deep_ep.hybrid_ep_buffer import HybridEPBuffer, HybridEpConfigInstance, indices_to_map
        from deep_ep.utils import EventHandle as handle_of_utils, EventOverlap as overlap_of_utils
        from deep_ep_cpp import Config as config_of_cpp, EventHandle as handle_of_cpp

        assert deep_ep is ferry.deep_ep
        assert Buffer is of_buffer is deep_ep._buffer.Buffer is deep_ep.buffer.Buffer is ferry.deep_ep.Buffer
        assert ElasticBuffer is of_elastic and EPHandle is handle_of_elastic and Buffer is of_legacy
        assert EventOverlap is deep_ep.utils.event.EventOverlap and EventHandle is deep_ep.utils.event.EventHandle
        assert HybridEPBuffer is deep_ep.HybridEPBuffer and HybridEpConfigInstance is deep_ep.HybridEpConfigInstance
        assert EventHandle is handle_of_utils is handle_of_cpp is ferry.deep_ep.EventHandle
        assert EventOverlap is overlap_of_utils is deep_ep.utils.EventOverlap is ferry.deep_ep.EventOverlap
        assert Config is config_of_cpp is ferry.deep_ep.Config
        assert deep_ep_cpp.is_sm90_compiled() and deep_ep_cpp.get_low_latency_rdma_size_hint(128, 7168, 8, 288) > 0
        assert hasattr(deep_ep_cpp, "topk_idx_t") == hasattr(deep_ep, "topk_idx_t")
        assert not hasattr(deep_ep_cpp, "nothing")
        """)


@pytest.mark.parametrize("first", ["deep_ep", "deep_ep.buffer", "deep_ep.buffers.elastic", "deep_ep.utils.event", "deep_ep_cpp", "hybrid_ep_cpp"])
def test_the_package_deep_ep(first):
    run(f"""if True:
        import {first}
        import deep_ep.utils
        from deep_ep import Buffer
        from deep_ep.buffer import Buffer as of_buffer
        from deep_ep_cpp import Config
        from hybrid_ep_cpp import HybridEpConfigInstance
        import ferry.deep_ep

        assert HybridEpConfigInstance is ferry.deep_ep.HybridEpConfigInstance
        assert Buffer is of_buffer is ferry.deep_ep.Buffer and Config is ferry.deep_ep.Config
        assert deep_ep is ferry.deep_ep
        """, REPOSITORY / "python/deep_ep")


def test_the_package_deep_ep_is_an_extra():
    ours, package = ((REPOSITORY / file).read_text() for file in ("pyproject.toml", "python/deep_ep/pyproject.toml"))
    version = re.search(r"project\(ferry VERSION ([0-9.]+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]
    our_name, name = (re.search(r'^name = "([^"]*)"', text, re.MULTILINE)[1] for text in (ours, package))
    assert f'deep_ep = ["{name}"]' in ours and f'dependencies = ["{our_name}"]' in package and f'version = "{version}"' in package


def test_without_pytorch():
    run("""if True:
        import sys
        sys.modules["torch"] = None  # makes the import fail
        import ferry.deep_ep
        from ferry.deep_ep import *

        assert Buffer is ferry.deep_ep.Buffer
        assert not hasattr(ferry.deep_ep, "topk_idx_t") and "topk_idx_t" not in ferry.deep_ep.__all__
        try:
            Buffer("x")
        except ferry.UsageError as error:
            assert "Buffer: expected a ferry.Group" in str(error) and "got str" in str(error) and "PyTorch" in str(error)
        else:
            raise AssertionError("nothing was refused")
        """)


def test_the_type_of_ids():
    torch = pytest.importorskip("torch")
    assert deep_ep.topk_idx_t is torch.int64 and "topk_idx_t" in deep_ep.__all__


def test_everything_public_is_documented():
    classes = deep_ep.Buffer, deep_ep.ElasticBuffer, deep_ep.EPHandle, deep_ep.HybridEPBuffer
    for public in (*classes, deep_ep.Config, deep_ep.HybridEpConfigInstance, deep_ep.EventHandle, deep_ep.EventOverlap, deep_ep.install):
        assert public.__doc__, public
    missing = [name for each in classes for name, member in inspect.getmembers(each, inspect.isfunction)
               if not name.startswith("_") and not member.__doc__]
    assert missing == []
