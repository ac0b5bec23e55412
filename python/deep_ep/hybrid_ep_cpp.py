"""The names that callers import from the compiled module of Hybrid-EP."""

import ferry.deep_ep

ferry.deep_ep.install()
