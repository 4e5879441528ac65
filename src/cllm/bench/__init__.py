"""Benchmarks anyone can repeat: cLLM beside a peer, on the same work, in the same run.

workloads/  one small file each: what is asked, in which order, and which figures come out
client.py   a light streaming client: asks, and writes down when text arrived
servers.py  starts and stops cLLM and the peer, one at a time
figures.py  figures, what they must reach, and the verdict
report.py   the table and the JSON file
"""
