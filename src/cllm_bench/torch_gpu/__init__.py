"""The torch engine on one GPU, with random weights of real shapes: what the workloads `torch*` need.

models.py      directories of models without weights, which are made up while they are loaded
engines.py     the engine in this process, and what it is asked
attention.py   decode attention alone
server.py      the HTTP server in a process of its own
"""
