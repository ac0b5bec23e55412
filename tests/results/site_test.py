"""scripts/check_site.py: it finds the formulas of a page that have lost their asterisks, logs in the search, and calls that it lacks."""

import unittest

import small_repository  # noqa: F401  (it finds the scripts)

from check_site import functions_as_values, lost_asterisks, missing_names, searchable_logs


class SiteTest(unittest.TestCase):
    def test_emphasis_within_a_formula_is_found(self):
        for page in ("<p>R<em>T</em>min(K, L)</p>", "<p>align(R<em>T</em>K)</p>", "<p>is S<em>align(N) (<code>x</code>: S</em>capacity)</p>",
                     "<p>(a)<em> b</em>(c)</p>", "<p>a<strong>T</strong> b</p>"):
            self.assertTrue(list(lost_asterisks(page)), page)

    def test_emphasis_of_words_is_not(self):
        for page in ("<p>a <em>row of tiles</em> is</p>", "<p>(<em>a</em>), <strong>b</strong>: c</p>", "<p><code>R * T * K</code></p>",
                     "<p>a <em>b</em>, <em>c</em>.</p>"):
            self.assertEqual(list(lost_asterisks(page)), [], page)

    def test_functions_are_not_shown_as_values(self):
        page = '<dt><span class="pre">mpi</span><em><span> = </span><span>&lt;nanobind.nb_func</span> <span>object&gt;</span></em></dt>'
        self.assertEqual(functions_as_values(page), ["mpi"])
        self.assertEqual(functions_as_values("<dt><span>mpi</span>() = 1, nanobind</dt>"), [])

    def test_logs_are_not_searched(self):
        index = 'Search.setIndex({"docnames":["contract","log/a"],"terms":{},"titles":["The contract","%s"]})'
        self.assertEqual(searchable_logs(index % ""), [])
        self.assertEqual(searchable_logs(index % "A log"), ["log/a"])

    def test_calls_are_searched_in_every_language(self):
        index = 'Search.setIndex({"objects":{"":[[1,2,1,"x","ferry::send"],[1,2,1,"c.ferry_send","ferry_send"]],"ferry.A":[[1,2,1,"","send"]]}})'
        self.assertEqual(missing_names(index, ("ferry.A.send", "ferry::send", "ferry_send")), [])
        self.assertEqual(missing_names(index, ("ferry.A", "ferry::A::send", "send", "ferry_send")), ["ferry.A", "ferry::A::send", "send"])


if __name__ == "__main__":
    unittest.main()
