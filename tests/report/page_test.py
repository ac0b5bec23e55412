#!/usr/bin/env python3
"""Pages of synthetic runs show the values of their JSON, and check_page.py finds every changed number.

usage: page_test.py PATH_OF_write_sample
"""

import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

sys.dont_write_bytecode = True
import check_page  # noqa: E402  (beside this file)

SEED = int(os.environ.get("FERRY_SEED") or random.SystemRandom().randrange(2**63))
SHAPES = {"one rank": (1, 8, 3), "small": (4, 16, 5), "usual": (8, 256, 200), "large": (64, 512, 3000),
          "compared": (8, 16, 100, 1)}  # with a run of one rank, which sends nothing
WRITER = ""
draw = check_page.drawn


@functools.cache
def drawn_once(text):
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        return draw(file.name)


def drawn(path):
    """Starting the browser takes most of the time, and several tests look at the same page."""
    with open(path, encoding="utf-8") as file:
        return drawn_once(file.read())


check_page.drawn = drawn


class Sample:
    """A page and its JSON in a temporary folder."""

    def __init__(self, shape):
        self.folder = tempfile.TemporaryDirectory()
        subprocess.run([WRITER, self.folder.name, str(SEED), *map(str, shape)], check=True)
        self.page = os.path.join(self.folder.name, "run.html")
        with open(os.path.join(self.folder.name, "run.json"), encoding="utf-8") as file:
            self.run = json.load(file)

    def close(self):
        self.folder.cleanup()

    def text(self):
        with open(self.page, encoding="utf-8") as file:
            return file.read()

    def replace_text(self, text):
        with open(self.page, "w", encoding="utf-8") as file:
            file.write(text)

    def problems(self):
        return check_page.problems_of(self.page, self.run)[0]


class SampleTest(unittest.TestCase):
    def sample(self, name):
        sample = Sample(SHAPES[name])
        self.addCleanup(sample.close)
        return sample


class PageTest(SampleTest):
    def test_every_value_shown_is_the_json_value(self):
        for name in SHAPES:
            with self.subTest(name):
                self.assertEqual(self.sample(name).problems(), [])

    def test_buttons_change_the_view_and_no_value(self):
        sample = self.sample("small")
        click = "<script>document.querySelectorAll('button').forEach((button) => button.click())</script>"
        sample.replace_text(sample.text().replace("</body>", click + "</body>"))
        self.assertEqual(sample.problems(), [])
        page = check_page.drawn(sample.page)
        self.assertRegex(page, r'<html lang="en" data-theme="(light|dark)">')
        self.assertIn('<div id="traffic-dispatch" hidden', page)
        loads = sample.run["load"]["routes_per_expert"]
        positions = dict(re.findall(r'data-path="load.routes_per_expert.(\d+)" x="([\d.]+)"', page))
        by_position = sorted(range(len(loads)), key=lambda expert: float(positions[str(expert)]))
        self.assertEqual([loads[expert] for expert in by_position], sorted(loads, reverse=True))

    def drawn_part(self, name):
        """What the script has drawn, without the script and its data."""
        return check_page.drawn(self.sample(name).page).split('<script type="application/json"')[0]

    def test_a_percentile_is_shown_only_of_a_hundred_steps(self):
        self.assertFalse("latency.step.p99_us" in self.drawn_part("small"))
        self.assertTrue("latency.step.p99_us" in self.drawn_part("usual"))

    def test_ranks_that_share_cores_are_named(self):
        said = r'ranks">4</span> ranks on <span data-path="machine.cores">2</span> cores: times include waiting for a core'
        self.assertTrue(re.search(said, self.drawn_part("small")))
        self.assertFalse("waiting for a core" in self.drawn_part("one rank"))

    def test_only_an_uneven_load_is_red(self):
        page = self.drawn_part("one rank")
        self.assertTrue('<span class="">busiest: rank' in page)  # 1.00 of the mean
        self.assertTrue(re.search(r'<rect class="" role="img"\s+data-path="load.rows_per_rank.0"', page))
        self.assertTrue('<span class="hot">busiest: expert' in page)  # a popular one

    def test_rows_of_shared_experts_stand_apart(self):
        page, load = self.drawn_part("small"), self.sample("small").run["load"]
        shown = re.search(r'besides <span data-path="load.shared_rows_per_rank">([\d,]+)</span> rows of its own for the shared experts', page)
        self.assertEqual(int(shown[1].replace(",", "")), load["shared_rows_per_rank"])
        self.assertTrue(re.search(r'data-path="configuration.shared_experts"[^>]*>2<', page))

    def test_an_earlier_run_stands_beside_this_one(self):
        page = self.drawn_part("compared")
        self.assertTrue('data-path="compared.differences.1.field">configuration.ranks<' in page)
        self.assertTrue('data-path="compared.differences.1.earlier">1<' in page)
        self.assertTrue(re.search(r'data-path="compared.ratios.latency.step.p50_us">[\d.]+ ×<', page))
        self.assertTrue('<section id="compared" aria-labelledby="compared-title" hidden' in self.drawn_part("small"))

    def test_changes_of_the_comparison_are_named(self):
        sample = self.sample("compared")
        script = ("for (const path of ['differences.1.earlier', 'figures.latency.step.p50_us', 'ratios.tokens_per_second'])"
                  "document.querySelector(`[data-path=\"compared.${path}\"]`).textContent = '12.3 ms'")
        sample.replace_text(sample.text().replace("</body>", f"<script>{script}</script></body>"))
        self.assertEqual({problem.split(": ")[0] for problem in sample.problems()},
                         {"compared.differences.1.earlier", "compared.figures.latency.step.p50_us", "compared.ratios.tokens_per_second"})

    def test_pages_drawn_together_are_each_compared_with_their_run(self):
        samples = [self.sample(name) for name in ("small", "one rank", "small")]
        samples[2].replace_text(samples[2].text().replace("</body>", f"<script>{next(iter(CHANGES))}</script></body>"))
        texts = check_page.drawn_together([sample.page for sample in samples])
        problems = [check_page.problems_of(sample.page, sample.run, text)[0] for sample, text in zip(samples, texts)]
        self.assertEqual([len(each) for each in problems], [0, 0, 1], problems)
        files = [f"{sample.folder.name}/run.{kind}" for sample in samples for kind in ("html", "json")]
        self.assertEqual(check_page.main(files[:4]), 0)
        self.assertEqual(check_page.main(files), 1)
        self.assertEqual(check_page.main(files[:3]), 2)

    def test_folders_may_have_any_name(self):
        sample = self.sample("small")
        with tempfile.TemporaryDirectory(prefix="a # folder? %41 " + "long-" * 30) as folder:
            with unittest.mock.patch.dict(os.environ, TMPDIR=folder), unittest.mock.patch.object(tempfile, "tempdir", folder):
                page = shutil.copy(sample.page, folder)
                self.assertEqual(check_page.problems_of(page, sample.run, draw(page))[0], [])

    def test_large_pages_stay_small(self):
        self.assertLess(os.path.getsize(self.sample("large").page), 1_000_000)

    def test_timeline_of_a_large_run_is_shortened_and_the_page_says_so(self):
        sample = self.sample("large")
        inside = check_page.embedded(sample.text())
        self.assertEqual(inside["timeline"]["steps"], 32)
        self.assertEqual(inside["latency"], sample.run["latency"])
        self.assertIn('The first <span data-path="timeline.steps">32</span> of', check_page.drawn(sample.page))


# A script that changes a correct page -> the beginning of the problem that must be found.
CHANGES = {
    """document.querySelector('b [data-path="latency.step.p50_us"]').textContent = "9.99 s" """:
        "latency.step.p50_us: '9.99 s' is shown",
    """const wire = document.querySelector('[data-path="dispatch.wire_bytes"]');
       wire.textContent = wire.textContent.replace(/[kMGT]?B/, "µs")""":
        "dispatch.wire_bytes: ",
    """const bar = document.querySelector('rect[data-path="load.routes_per_expert.3"]');
       bar.setAttribute("height", 1 + +bar.getAttribute("height"))""":
        "load.routes_per_expert.3: ",
    """document.querySelector('[data-path="combine.traffic_bytes.1.2"]').style.setProperty("--v", 0.01)""":
        "combine.traffic_bytes.1.2: has shade",
    """document.querySelector('[data-path="dispatch.traffic_bytes.2.1"]').setAttribute("aria-label", "a: 1 B")""":
        "dispatch.traffic_bytes.2.1: '1 B' is shown",
    """document.querySelector('[data-path="timeline.spans_us.2.3.1"]').setAttribute("width", 1)""":
        "timeline.spans_us.2.3.1: is drawn from",
    """document.querySelector('i[data-path="latency.dispatch.p90_us"]').style.left = "50%" """:
        "latency.dispatch.p90_us: lies at",
    """document.querySelectorAll('[data-path="load.idle_experts"]').forEach((e) => e.remove())""":
        "load.idle_experts: is not shown",
    """byId("verdict").innerHTML += "<i>and 17 more</i>" """:
        "page: 'and 17 more' is a number that",
}


class ChangedTest(SampleTest):
    def setUp(self):
        self.small = self.sample("small")

    def draw_and_then(self, script):
        self.small.replace_text(self.small.text().replace("</body>", f"<script>{script}</script></body>"))

    def assert_named(self, beginning):
        problems = self.small.problems()
        self.assertTrue(any(problem.startswith(beginning) for problem in problems), problems)

    def exit_code(self):
        changed = os.path.join(self.small.folder.name, "changed.json")
        with open(changed, "w", encoding="utf-8") as file:
            json.dump(self.small.run, file)
        return check_page.main([self.small.page, changed])

    def test_exit_code_shows_one_changed_number(self):
        self.assertEqual(self.exit_code(), 0)
        self.small.run["load"]["routes_per_expert"][5] += 1
        self.assertEqual(self.exit_code(), 1)
        self.assert_named("load.routes_per_expert.5: ")

    def test_json_in_page_changed(self):
        before = f'"max_us":{self.small.run["latency"]["combine"]["max_us"]}'
        self.assertEqual(self.small.text().count(before), 1)
        self.small.replace_text(self.small.text().replace(before, '"max_us":123456.789'))
        self.assert_named("latency.combine.max_us: 123456.789 inside the page")
        self.assert_named("latency.combine.max_us: '123 ms' is shown")

    def test_one_text_changed(self):
        self.draw_and_then(next(iter(CHANGES)))
        problems = self.small.problems()
        self.assertEqual(len(problems), 1, problems)

    def test_every_kind_of_change_is_named(self):
        self.draw_and_then(";\n".join(CHANGES))
        problems = self.small.problems()
        for beginning in CHANGES.values():
            with self.subTest(beginning):
                self.assertTrue(any(problem.startswith(beginning) for problem in problems), problems)

    def test_requests_are_named(self):
        text = self.small.text()
        self.assertEqual(list(check_page.request_problems(text)), [])
        for line in ('<img alt="" src="x.png">', '<link rel="stylesheet" href="https://example.org/a.css">',
                     '<script>fetch("a")</script>', "<style>@import 'a.css'</style>"):
            with self.subTest(line):
                self.assertNotEqual(list(check_page.request_problems(text.replace("</body>", line + "</body>"))), [])
        self.assertNotEqual(list(check_page.request_problems(text.replace(check_page.POLICY, "default-src *"))), [])


if __name__ == "__main__":
    WRITER = sys.argv.pop()
    if not any(map(shutil.which, check_page.BROWSERS)) and os.environ.get("CI") != "true":
        print("no Chromium found")
        sys.exit(77)
    print(f"seed {SEED} (FERRY_SEED repeats it)")
    unittest.main()
