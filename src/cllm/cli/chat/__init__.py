"""`cllm chat`: a conversation at the terminal.

command.py        the command and its options
session.py        the loop: read a line, run a command or ask the model
conversation.py   the messages so far, and how the next one is generated
sampling.py       sampling parameters by name, for /set and saved files
input.py          reading questions: a line editor at a terminal, plain lines from a pipe
output.py         writing answers: word-wrapped at a terminal
"""
