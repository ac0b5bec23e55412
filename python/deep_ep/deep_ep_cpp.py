"""The names that callers import from the compiled module of DeepEP."""

import ferry.deep_ep

ferry.deep_ep.install()
