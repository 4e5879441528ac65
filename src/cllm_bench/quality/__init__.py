"""How far an engine's predictions are from those of another: what `kv-types` and `truth` measure.

comparison.py  perplexity, agreement and divergence over every position of a text
texts.py       the text in parts (text.txt: prose, dialogue, code and other languages, written for this)
reference.py   the same weights in float32, by Hugging Face transformers
llama.py       llama.cpp's logits of every position
cli.py         `cllm bench kv-types` and `cllm bench truth`
"""
