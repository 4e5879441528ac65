"""From a configuration to a model that can compute.

backend_choice.py     which backend runs the model
estimate.py           how much memory it will take, before anything is loaded
resources.py          how many threads and how much K/V memory it gets
open_model.py         the model's file, tokenizer, chat template and backend
torch_model.py        the same for torch, on a CPU or a GPU
host_cache.py         K/V in the host's memory beside a GPU's
disk_cache.py         K/V on disk
sampling_defaults.py  sampling parameters that a request leaves out
embedder.py           embeddings and ranks
text_model.py         `TextModel`: the model without its weights
parts.py              `load_model`: all of it put together
"""
