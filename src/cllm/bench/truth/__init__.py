"""How far an engine is from the truth: the same weights, computed in float32 throughout.

    cllm bench truth

reference.py   the truth: Hugging Face transformers on the file's dequantised weights
llama.py       llama.cpp's logits of every position
measure.py     every side on the same text, beside the truth
results.py     the table and the JSON file
"""
