"""scripts/check_site.py: it finds the formulas of a page that have lost their asterisks, and logs in the search."""

import unittest

import small_repository  # noqa: F401  (it finds the scripts)

from check_site import lost_asterisks, searchable_logs


class SiteTest(unittest.TestCase):
    def test_emphasis_within_a_formula_is_found(self):
        for page in ("<p>R<em>T</em>min(K, L)</p>", "<p>align(R<em>T</em>K)</p>", "<p>is S<em>align(N) (<code>x</code>: S</em>capacity)</p>",
                     "<p>(a)<em> b</em>(c)</p>", "<p>a<strong>T</strong> b</p>"):
            self.assertTrue(list(lost_asterisks(page)), page)

    def test_emphasis_of_words_is_not(self):
        for page in ("<p>a <em>row of tiles</em> is</p>", "<p>(<em>a</em>), <strong>b</strong>: c</p>", "<p><code>R * T * K</code></p>",
                     "<p>a <em>b</em>, <em>c</em>.</p>"):
            self.assertEqual(list(lost_asterisks(page)), [], page)

    def test_logs_are_not_searched(self):
        index = 'Search.setIndex({"docnames":["contract","log/a"],"terms":{},"titles":["The contract","%s"]})'
        self.assertEqual(searchable_logs(index % ""), [])
        self.assertEqual(searchable_logs(index % "A log"), ["log/a"])


if __name__ == "__main__":
    unittest.main()
