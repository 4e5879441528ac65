"""What each pair of K and V types costs and gives: quality on a text, speed, bytes.

    cllm bench kv-types

quality.py     perplexity, agreement and divergence over every position of a text
measure.py     all pairs in turn: the text, then decode steps of one stream and of many
results.py     what was measured, the table, the verdicts and the JSON file
page.py        the page with plots: loss against bytes, speed against bytes
text.txt       prose, dialogue, code and other languages, written for this
"""
