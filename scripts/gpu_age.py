#!/usr/bin/env python3
"""Prints how many commits of GPU code are newer than each committed GPU result. CI has no GPU: scripts/gpu makes the results."""

import json
import pathlib
import subprocess

CODE = ["src/backends/cuda", "src/layout", "src/format"]


def commits_since(commit):
    command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *CODE]
    done = subprocess.run(command, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else None


def main():
    results = [json.loads(path.read_text()) | {"file": path.name} for path in sorted(pathlib.Path("bench/results").glob("*.json"))]
    if not results:
        print("GPU results: none are committed")
    for result in results:
        behind = commits_since(result["commit"])
        age = "of a commit that this history does not contain" if behind is None else f"{behind} newer commits of GPU code"
        print(f"GPU results: {result['file']}, {result['date']}, {age}")


if __name__ == "__main__":
    main()
