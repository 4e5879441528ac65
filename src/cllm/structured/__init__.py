"""Answers of a given shape: JSON by a schema, a regular expression, a choice, a grammar.

structure.py   what an answer must look like, as a request says it
compiler.py    a `Structure` becomes a `Grammar`: in threads, within limits, kept for the next who asks
sources.py     what llguidance is given for each kind of structure
schemas.py     a JSON schema in the words that llguidance knows, with nodes.py (what is where in it),
               exclusion.py (oneOf), formats.py, patterns.py, numbers.py and effort.py (limits)
places.py      where in a schema an error is
vocabulary.py  the model's tokens as llguidance knows them
matcher.py     one answer's way through a grammar: which tokens may come next, which must
"""
