"""Work whose cost a request or a model file decides: done in processes that can be limited, killed and replaced.

process.py   what runs in them: parents, which only fork, and workers
parents.py   starts a parent, and has it fork
worker.py    one worker, from the server's side
turns.py     the request, and the key, that a job belongs to, and whose job is next: fair between keys
pool.py      `Workers`: runs jobs

Nothing is imported here, because worker processes would import it, too.
"""
