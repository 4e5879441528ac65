"""Work made of ordinary requests to an `AsyncLLM`.

chat.py       the next message of a conversation, for the command line and scripts; the grammar of answers, for all
embedding.py  many texts to embed
warm.py       prefixes computed before a request needs them, and pinned ones computed again
"""
