#!/usr/bin/env python3
"""Pages of synthetic runs as a browser shows them, on a desk and on a phone, in both themes: contrast, labels, captions, hints.

usage: look_test.py PATH_OF_write_sample
"""

import functools
import html
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import check_page  # noqa: E402  (beside this file)

WIDTHS, THEMES = (1400, 390), ("light", "dark")
SHAPES = {"usual": (8, 256, 16), "many ranks": (64, 512, 40), "compared": (8, 256, 100, 8), "other work": (4, 16, 5, 2), "two ranks": (2, 16, 5)}
LEAST_CONTRAST = 4.5
WRITER = ""

# Looks at the page in each frame: every visible text with its colours, the axes, and what sticks out.
LOOK = r"""
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const seen = new Map();
function rgb(color) {  // [r, g, b, alpha] of any CSS colour
  if (!seen.has(color)) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    seen.set(color, [...canvas.getImageData(0, 0, 1, 1).data]);
  }
  return seen.get(color);
}
const linear = (c) => (c <= 10 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
function contrast(a, b) {
  const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (high + 0.05) / (low + 0.05);
}
function look(page) {
  const style = (element) => page.defaultView.getComputedStyle(element);
  const background = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = rgb(style(e).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const shown = (element) => element.getClientRects().length > 0 && style(element).visibility === "visible";
  const texts = [];
  for (const element of page.querySelectorAll("body *")) {
    if (element.closest("script, noscript, #tip") || !shown(element)) continue;
    const words = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.textContent.trim()).join(" ").trim();
    if (words) texts.push([words, contrast(rgb(style(element).color), background(element))]);
  }
  const box = (element) => { const { left, right } = element.getBoundingClientRect(); return [left, right]; };
  const axis = (name) => [...page.querySelectorAll(name)].filter(shown).map((frame) => ({
    box: box(frame), labels: [...frame.querySelectorAll("span")].filter(shown).map((e) => [e.textContent, ...box(e)]) }));
  const paint = (name) => { const e = page.querySelector(name); return e ? contrast(rgb(style(e).fill), background(e)) : null; };
  return {
    texts, wide: page.documentElement.scrollWidth,
    marks: Object.fromEntries(["dispatch", "experts", "combine"].map((s) => [s, paint(`.lanes rect.${s}`)])),
    axes: { latency: axis(".row.head .range"), steps: axis(".axis.above"), places: axis(".axis.below") },
    heat: [...page.querySelectorAll(".heat-frame")].filter(shown).map((frame) =>
      [frame.scrollWidth > frame.clientWidth + 1, shown(frame.nextElementSibling)]),
    note: page.querySelector("#timeline-note").textContent,
    barsBelowTop: [...page.querySelectorAll(".bars")].map((bars) => {
      const top = Math.min(...[...bars.querySelectorAll("rect")].map((e) => e.getBoundingClientRect().top));
      return Math.min(...[...bars.querySelectorAll(".grid")].map((e) => e.getBoundingClientRect().top)) <= top + 1;
    }),
  };
}
addEventListener("load", () => {
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument;
    page.documentElement.dataset.theme = frame.dataset.theme;
    found.push(look(page));
    page.querySelector('[data-move="all"]').click();
    found[found.length - 1].noteOfAll = page.querySelector("#timeline-note").textContent;
  }
  const text = document.createElement("pre");
  text.textContent = JSON.stringify(found);
  document.body.append(text);
});"""


def looked_at(pages):
    """What LOOK finds in each of the pages (text, width, theme)."""
    frames = "".join(f'<iframe width="{width}" height="2000" data-theme="{theme}" srcdoc="{html.escape(text)}"></iframe>'
                     for text, width, theme in pages)
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file:
        file.write(f"<!doctype html><meta charset=utf-8><script>{LOOK}</script><body>{frames}")
        file.flush()
        found = check_page.drawn(file.name).rpartition("<pre>")[2].partition("</pre>")[0]
    return json.loads(html.unescape(found))


@functools.cache
def page_of(name):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([WRITER, folder, "20261129", *map(str, SHAPES[name])], check=True)
        return pathlib.Path(folder, "run.html").read_text(encoding="utf-8")


@functools.cache
def looks():
    """(name, width, theme) -> what is seen, all pages drawn together."""
    keys = [(name, width, theme) for name in SHAPES for width in WIDTHS for theme in THEMES]
    return dict(zip(keys, looked_at([(page_of(name), width, theme) for name, width, theme in keys]), strict=True))


def low_contrast(look):
    return [text for text in look["texts"] if text[1] < LEAST_CONTRAST]


class LookTest(unittest.TestCase):
    def test_every_text_has_contrast(self):
        for key, look in looks().items():
            with self.subTest(key):
                name, _width, _theme = key
                self.assertGreater(len(look["texts"]), 100)
                self.assertEqual(low_contrast(look), [], name)

    def test_low_contrast_is_found(self):
        text = page_of("two ranks").replace("</style>", "#traffic .cell { color: #5a83a6 } #verdict { opacity: 1; color: #aaa } </style>")
        found = {words for words, _ in low_contrast(looked_at([(text, 1400, "light")])[0])}
        self.assertTrue(any(words.startswith("✓") for words in found), found)
        self.assertTrue(any(words.replace(".", "").isdigit() for words in found), found)

    def test_stages_can_be_told_from_the_panel(self):
        for key, look in looks().items():
            with self.subTest(key):
                for stage, contrast in look["marks"].items():
                    self.assertGreater(contrast, 2.8, stage)

    def test_the_page_does_not_scroll_sideways(self):
        for key, look in looks().items():
            with self.subTest(key):
                _name, width, _theme = key
                self.assertLessEqual(look["wide"], width)

    def test_a_matrix_that_scrolls_says_so(self):
        for key, look in looks().items():
            with self.subTest(key):
                for scrolls, hinted in look["heat"]:
                    self.assertEqual(scrolls, hinted)
        self.assertTrue(any(scrolls for scrolls, _ in looks()["usual", 390, "light"]["heat"]))
        self.assertFalse(any(scrolls for scrolls, _ in looks()["usual", 1400, "light"]["heat"]))

    def test_axes_have_whole_labels_apart_from_each_other(self):
        for key, look in looks().items():
            with self.subTest(key):
                name, width, _theme = key
                for axis, frames in look["axes"].items():
                    for frame in frames:
                        labels = sorted(frame["labels"], key=lambda label: label[1])
                        self.assertGreaterEqual(len(labels), 2 if axis == "latency" or SHAPES[name][2] > 9 else 1, (axis, labels))
                        for before, after in zip(labels, labels[1:]):
                            self.assertLessEqual(before[2], after[1], (axis, before, after))
                        for words, left, right in labels:
                            self.assertTrue(0 <= left and right <= width, (axis, words, left, right))
                            if axis == "steps":
                                self.assertTrue(frame["box"][0] - 1 <= left and right <= frame["box"][1] + 1, (words, left, right, frame["box"]))

    def test_a_tick_stands_above_the_highest_bar(self):
        for key, look in looks().items():
            with self.subTest(key):
                self.assertEqual(look["barsBelowTop"], [True, True])

    def test_the_timeline_says_which_steps_it_shows(self):
        for key, look in looks().items():
            with self.subTest(key):
                name, _width, _theme = key
                steps = min(SHAPES[name][2], 2048 // SHAPES[name][0])
                self.assertRegex(look["noteOfAll"], f"^Steps 0 to {steps - 1} of {steps}, counted from 0\\. Drag")
                if steps > 9:
                    self.assertRegex(look["note"], f"^Steps 0 to [0-9] of {steps}, counted from 0\\. “All” shows the others")

    def test_words_say_what_marks_and_axes_are(self):
        words = [text for text, _ in looks()["compared", 390, "dark"]["texts"]]
        for wanted in ("p50, the median", "p90, p99", "end of the line: max", "routes", "expert", "rows", "rank", "noise"):
            self.assertIn(wanted, words)

    def test_runs_that_do_other_work_are_not_judged(self):
        judged = {"noise", "equal", "✓ better", "✕ worse"}
        for name, wanted in (("compared", True), ("other work", False)):
            words = {text for text, _ in looks()[name, 1400, "light"]["texts"]}
            self.assertEqual(bool(words & judged), wanted, name)


if __name__ == "__main__":
    WRITER = sys.argv.pop()
    if not any(map(shutil.which, check_page.BROWSERS)) and os.environ.get("CI") != "true":
        print("no Chromium found")
        sys.exit(77)
    unittest.main()
