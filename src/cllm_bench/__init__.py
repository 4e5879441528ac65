"""Benchmarks anyone can repeat: cLLM beside its peers, on the same work, in the same run.

workloads/     one small file each: what is asked, in which order, and which figures come out
peers.py       llama.cpp's server with its best settings, and servers by their address
runners/       programs that run in a process of their own: llama.cpp's server, engines without a server
kernels/       engines without a server, each in a process of its own
torch_gpu/     the torch engine on a GPU, with random weights
simulate/      `cllm simulate`: the real scheduler and cache on a cost model
drafts/        texts that repeat themselves, and some that do not
random_model.py  GGUF files of real shapes with random weights (random_blocks.py, random_vocabulary.py)
administered.py  a paged cache without a model: bookkeeping alone
quality/       how far an engine's predictions are from those of another
client.py      a light streaming client: asks, and writes down when text arrived (http.py, load.py)
servers.py     starts and stops what is measured, one at a time
watch.py       CPU, memory and cache of a server, sampled beside the load
measures.py    from answers and samples to the figures that every work has (stats.py)
figures.py     figures, what they must reach, and the verdict
run.py         one call of `cllm bench`, from options to results
live.py        what is seen while it runs
report.py      the table and the JSON file
page.py        the page with plots, by the parts in pages/
"""
