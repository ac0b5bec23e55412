"""The example that draws pictures: its numbers are those of the traffic."""

import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import ferry

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples/pictures.py"


def test_the_picture_shows_the_traffic(tmp_path):
    output = tmp_path / "pictures.svg"
    name = "synth:decode:experts=32,top_k=4,tokens=2048,layers=1,seed=5"
    printed = subprocess.run([sys.executable, EXAMPLE, name, output], check=True, capture_output=True, text=True).stdout
    trace = ferry.open_trace(name)
    counts = trace.expert_counts(0)  # the example runs 4 steps of 8 ranks with 64 tokens: the whole trace
    assert printed.startswith(f"{counts.sum()} routes, busiest expert {counts.max() / counts.mean():.2f} x the mean")
    texts = [text.text for text in ElementTree.parse(output).iter("{http://www.w3.org/2000/svg}text")]
    numbers = [int(text) for text in texts if text.isdigit()]
    placement = ferry.Placement.blocks(32, 8)
    tokens = sum(len({placement.location(int(e))[0] for e in row}) for row in trace.ids[0])
    assert len(numbers) == 64 and sum(numbers) == tokens
