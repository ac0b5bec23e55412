#!/usr/bin/env python3
"""Compares every value that the page of a run shows with the run's JSON.

usage: check_page.py PAGE [JSON]
       check_page.py PAGE JSON PAGE JSON ...

Opens PAGE in headless Chromium and compares everything that its script has drawn (texts, labels, and the sizes, positions
and shades of marks) with JSON, a file of `ferry run --json`; by default with the JSON inside the page. Also checks that
every value of the JSON is shown, that every number shown is in the JSON, and that the page makes no requests. The browser,
which takes seconds to start, draws all pages of a call together.

Exit codes: 0 all equal; 1 differences, which are printed; 2 bad command line, file or browser; 77 no Chromium found.
"""

import html
import html.parser
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NOT_SHOWN = re.compile(r"schema|schema_version|load\.rank_of_expert\..*|configuration\.node_of_rank\..*|"
                       r"timeline\.spans_us\..*\.[01]|compared\.same_work")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
VOID = {"meta", "link", "br", "img", "input", "hr", "source", "wbr", "base"}

# Unit -> (dimension, size).
UNITS = {"": ("number", 1), "%": ("share", 0.01), "×": ("times", 1)}
UNITS |= {"µs": ("time", 1), "ms": ("time", 1e3), "s": ("time", 1e6)}
for name, size in {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}.items():
    UNITS |= {name: ("bytes", size), name + "/s": ("rate", size)}

WORDS = {"passed": ("failed", "passed"), "synthesised": ("recorded", "synthesised"), "simulated_nodes": ("real", "simulated")}


class BrowserError(Exception):
    pass


class NoBrowser(Exception):
    pass


class Element:
    def __init__(self, tag, attributes, parent):
        self.tag, self.attributes, self.parent, self.text = tag, attributes, parent, ""

    def get(self, name):
        return self.attributes.get(name)

    def classes(self):
        return (self.get("class") or "").split()

    def style(self, name):
        found = re.search(rf"(?:^|[;\s]){re.escape(name)}:\s*([-\d.e]+)", self.get("style") or "")
        return float(found[1]) if found else None

    def within(self, wanted):
        return wanted(self) or (self.parent is not None and self.parent.within(wanted))


class Page(html.parser.HTMLParser):
    """The elements of a drawn page that show values, and the numbers outside of them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.values, self.stray = None, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        element = Element(tag, dict(attributes), self.open)
        if "data-path" in element.attributes:
            self.values.append(element)
        if tag not in VOID:
            self.open = element

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        while self.open is not None:
            closed, self.open = self.open.tag, self.open.parent
            if closed == tag:
                return

    def handle_data(self, text):
        if self.open is None or self.open.within(lambda e: e.tag in ("script", "style", "title")):
            return
        self.open.text += text
        explained = self.open.within(lambda e: "data-path" in e.attributes or "data-label" in e.attributes)
        if re.search(r"\d", text) and not explained:
            self.stray.append(" ".join(text.split()))


def setting_of(path, run):
    """The path of the setting that a difference between two runs is about; other paths are returned as they are."""
    found = re.fullmatch(r"compared\.differences\.(\d+)\.(earlier|now)", path)
    return run["compared"]["differences"][int(found[1])]["field"] if found else path


def value_at(run, path):
    for key in path.split("."):
        run = run[int(key)] if isinstance(run, list) else run[key]
    return run


def leaves(value, path=""):
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def dimension(path):
    if path.startswith("compared.ratios."):
        return "times"
    name = next(part for part in reversed(path.split(".")) if not part.isdigit())
    endings = {"_us": "time", "_bytes": "bytes", "_bytes_per_second": "rate"}
    if name == "bytes_per_second":
        return "rate"
    if name == "share_of_memcpy":
        return "share"
    if name == "over_mean":
        return "times"
    return next((kind for end, kind in endings.items() if name.endswith(end)), "number")


def text_problem(path, value, text, unit=""):
    """None if the text equals the value to the digits shown, otherwise the difference."""
    text = " ".join(text.split())
    if isinstance(value, bool):
        expected = WORDS[path.split(".")[-1]][value]
        return None if text == expected else f"'{text}' is shown, expected '{expected}'"
    if isinstance(value, str):
        expected = " ".join(value.split())
        return None if text == expected else f"'{text}' is shown, expected '{expected}'"
    if value is None:
        return f"'{text}' is shown, but the value was not measured"
    found = re.fullmatch(r"(-?[\d,]+(?:\.(\d+))?)(?:e([+-]\d+))?\s*(\D*)", text)
    if not found:
        return f"'{text}' is shown, which is not a number; expected {value}"
    digits, decimals, exponent, shown_unit = found.groups()
    kind, size = UNITS.get((shown_unit or unit).strip(), ("unknown", 1))
    if kind != dimension(path):
        return f"'{text}' is shown, a {kind}, not a {dimension(path)}"
    size *= 10.0 ** int(exponent or 0)
    number = float(digits.replace(",", "")) * size
    half = 0.5 * 10.0 ** -len(decimals or "") * size
    if abs(number - value) <= half * (1 + 1e-6) + 1e-12 * abs(value):
        return None
    return f"'{text}' is shown, expected {value}"


def near(a, b, allowed):
    return a is not None and abs(a - b) <= allowed


def mark_problem(element, value, run):
    """None if the mark has the size, position or shade of the value, otherwise the difference."""
    path = element.get("data-path")
    if path.startswith("timeline.spans_us."):
        begin, end = value
        x, width = float(element.get("x")), float(element.get("width"))
        right = near(x, begin, 5e-4) and near(x + width, end, 1e-3)
        return None if right else f"is drawn from {x} to {x + width}, expected {begin} to {end}"
    if element.tag == "rect":
        return None if float(element.get("height")) == value else f"is {element.get('height')} tall, expected {value}"
    if element.tag == "i":
        low, high = float(element.parent.get("data-low")), float(element.parent.get("data-high"))
        position = 100 * math.log(max(value, low) / low) / math.log(high / low)
        return None if near(element.style("left"), position, 1e-3) else f"lies at {element.get('style')}, expected {value}"
    if "cell" in element.classes():
        direction, matrix = path.split(".")[:2]
        rows = run[direction][matrix]
        between = [bytes_ for f, row in enumerate(rows) for t, bytes_ in enumerate(row) if f != t]
        least, most = min(between), max(between)
        share = (value - least) / (most - least) if most > least else 0
        return None if near(element.style("--v"), share, 1e-4) else f"has shade {element.get('style')}, expected {value}"
    return None


def element_problems(element, run):
    path = element.get("data-path")
    try:
        value = value_at(run, path)
    except (KeyError, IndexError, ValueError, TypeError):
        yield f"{path}: is not in the JSON"
        return
    spans = path.startswith("timeline.spans_us.")
    problems = [mark_problem(element, value, run)]
    if element.text.strip():
        problems.append(text_problem(setting_of(path, run), value, element.text, element.get("data-unit") or ""))
    if element.get("aria-label"):
        problems.append(text_problem(path, value, element.get("aria-label").rsplit(": ", 1)[-1]))
    elif not element.text.strip() and not spans:
        problems.append("shows nothing")
    yield from (f"{path}: {problem}" for problem in problems if problem)


def required(path, value, run):
    if NOT_SHOWN.fullmatch(path) or value is None or value == "":
        return False
    return run["machine"]["memcpy_bytes_per_second"] > 0 or not path.startswith("machine.memcpy")


def request_problems(page):
    """Everything that could make a browser send a request, outside of the run's own strings."""
    page = re.sub(r'(<script type="application/json" id="run">).*?(</script>)', r"\1\2", page, flags=re.S)
    if f'http-equiv="Content-Security-Policy" content="{POLICY}"' not in page:
        yield "page: its content security policy does not forbid requests"
    for pattern in (r"https?:", r"\bsrc\s*=", r"\bhref\s*=", r"\burl\(", r"@import", r"\bimport\s*\(", r"\bfetch\s*\(",
                    r"XMLHttpRequest", r"WebSocket", r"sendBeacon", r"<(?:link|iframe|object|embed|img)\b"):
        if found := re.search(pattern, page, flags=re.I):
            yield f"page: '{found[0]}' could send a request"


def embedded(page):
    found = re.search(r'<script type="application/json" id="run">(.*?)</script>', page, flags=re.S)
    if not found:
        raise ValueError("the page holds no JSON of a run")
    return json.loads(found[1])


def first_steps(run, steps):
    """The run with its timeline shortened to `steps`, as the page's is."""
    timeline = run["timeline"]
    return run | {"timeline": {"steps": steps, "spans_us": timeline["spans_us"][:steps]}}


# Appends what has been drawn in each frame to the page that holds the frames.
COLLECT = """addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const text = document.createElement("pre");
    text.textContent = frame.contentDocument.documentElement.outerHTML;
    document.body.append(text);
  }
});"""


def drawn_together(paths):
    """As drawn() of each page. Their scripts run in frames, which have the pages' content security policy."""
    frames = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            frames.append(f'<iframe width="1100" height="900" srcdoc="{html.escape(file.read())}"></iframe>')
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file:
        file.write(f"<!doctype html><meta charset=utf-8><script>{COLLECT}</script><body>{''.join(frames)}")
        file.flush()
        texts = re.findall(r"<pre>(.*?)</pre>", drawn(file.name).rpartition("</iframe>")[2], flags=re.S)
    if len(texts) != len(paths):
        raise BrowserError(f"the browser has drawn {len(texts)} of {len(paths)} pages")
    return [html.unescape(text) for text in texts]


def drawn(path):
    browser = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if not browser:
        raise NoBrowser
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   f"--user-data-dir={profile}", "--window-size=1100,900", "--virtual-time-budget=5000", "--dump-dom",
                   pathlib.Path(path).absolute().as_uri()]
        try:
            # The browser makes a socket below TMPDIR, and the path of a socket has at most 107 characters.
            done = subprocess.run(command, capture_output=True, timeout=120, check=False, env={**os.environ, "TMPDIR": "/tmp"})
        except subprocess.TimeoutExpired as error:
            raise BrowserError(f"{browser} took over {error.timeout:.0f} s") from error
    if done.returncode != 0 or not done.stdout:
        raise BrowserError(f"{browser} ended with {done.returncode}: {done.stderr[-500:].decode(errors='replace')}")
    return done.stdout.decode()


def problems_of(path, run=None, text=None):
    """All differences between the page and the run, and the number of values compared. `text`: drawn() of the page."""
    with open(path, encoding="utf-8") as file:
        page = file.read()
    problems = list(request_problems(page))
    inside = embedded(page)
    run = inside if run is None else first_steps(run, len(inside["timeline"]["spans_us"]))
    if inside != run:
        there, here = dict(leaves(inside)), dict(leaves(run))
        problems += [f"{at}: {there.get(at)} inside the page, {here.get(at)} in the JSON"
                     for at in sorted(there.keys() | here.keys()) if there.get(at) != here.get(at)]

    dom = Page(drawn(path) if text is None else text)
    problems += [problem for element in dom.values for problem in element_problems(element, run)]
    problems += [f"page: '{text}' is a number that is not in the JSON" for text in dom.stray]
    shown = {element.get("data-path") for element in dom.values}
    problems += [f"{at}: is not shown" for at, value in leaves(run) if required(at, value, run) and at not in shown]
    spans = [f"timeline.spans_us.{s}.{r}.{p}" for s, step in enumerate(run["timeline"]["spans_us"])
             for r, rank in enumerate(step) for p in range(len(rank))]
    return problems + [f"{at}: is not shown" for at in spans if at not in shown], len(dom.values)


def problems_of_all(arguments):
    """Of each page of the command line: its name, its problems, and the number of values compared."""
    if len(arguments) <= 2:
        pages, texts = [(arguments[0], arguments[1:])], [None]
    else:
        pages = [(page, [run]) for page, run in zip(arguments[::2], arguments[1::2])]
        texts = drawn_together([page for page, _ in pages])
    for (page, given), text in zip(pages, texts):
        run = None
        for path in given:
            with open(path, encoding="utf-8") as file:
                run = json.load(file)
        yield page, *problems_of(page, run, text)


def main(arguments):
    if not arguments or (len(arguments) > 1 and len(arguments) % 2 != 0):
        print(__doc__, file=sys.stderr)
        return 2
    found = False
    try:
        for page, problems, compared in problems_of_all(arguments):
            for problem in problems[:20]:
                print(problem)
            print(f"{page}: {compared} values compared, {len(problems)} problems")
            found = found or bool(problems)
    except NoBrowser:
        print("check_page: no Chromium found", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 77
    except (OSError, ValueError, KeyError, TypeError, BrowserError) as error:
        print(f"check_page: {error}", file=sys.stderr)
        return 2
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
