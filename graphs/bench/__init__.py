"""Measuring tools, from which the figures of RESULTS.md come.

`python -m graphs.bench` in the root of the project lists them.
"""
