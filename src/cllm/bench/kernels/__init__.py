"""The engine without a server: cLLM's own kernels beside other engines and beside the machine's limits.

    cllm bench kernels

works.py       the pieces of work, who does them, and what must be reached
streams.py     how a piece of work is timed, the same way on every engine
blocks.py      streams on cLLM's engine
native.py      cLLM's engine     }
llama.py       llama.cpp         }  each in a process of its own, see worker.py
genai.py       OpenVINO GenAI    }
processes.py   starts those processes and asks them
run.py         all work, side by side, in turn
table.py       the figures, their verdicts, the table and the JSON file
scaling.py     cLLM's engine by number of threads (scaling_report.py: table and JSON file, scaling_plot.py: picture)
shapes.py      random weights of real shapes, for machines without model files
"""
