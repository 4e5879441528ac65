"""Text: tokenizers, chat templates and detokenisation.

tokenizer.py             the interface, limits on prompts, and tokenizers from GGUF files (bpe.py, spm.py, vocab.py)
hf_tokenizer.py          tokenizers from Hugging Face directories
chat_template.py         messages to a prompt; messages.py checks, adapting.py adapts them, sandbox.py runs it
special_token_guard.py   keeps user text from becoming special tokens
volatile.py              removes text that changes with every request from system prompts
detokenizer.py           tokens to text, incrementally, with stop strings
rerank.py, infill.py     prompts of rerankers, and for filling in the middle
export.py                a model's tokenizer as a Hugging Face directory
"""
