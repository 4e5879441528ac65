"""The engine without a server: what `cllm bench kernels` needs (workloads/kernels.py, workloads/scaling.py).

cli.py         `cllm bench kernels`
works.py       the pieces of work, the peers, and what must be reached
streams.py     how a piece of work is timed, the same way on every engine
blocks.py      streams on cLLM's engine
native.py      cLLM's engine     }
llama.py       llama.cpp         }  each in a process of its own (runners/kernels.py)
genai.py       OpenVINO GenAI    }
limits.py      what the machine can do at most
requantise.py  the model as Q4_0, for llama.cpp
shapes.py      random weights of real shapes, for machines without model files
layered.py     shapes of models whose layers differ
"""
