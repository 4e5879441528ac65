"""Reports of benchmarks.

extras.py      checks, before the work, that it can be drawn and written
plots.py       plots by matplotlib, which is imported when the first one is drawn
page.py        sections of text, tables and plots, rendered by page.html.j2 into one file that needs nothing else
"""
